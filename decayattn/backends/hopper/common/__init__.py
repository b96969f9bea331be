"""What both directions share: pipelines through shared memory, fragments, tables of tiles, descriptors."""
