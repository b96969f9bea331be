"""Code of both directions: pipelines through shared memory, fragments, tables of tiles, descriptors."""
