"""The forward: work tiles, decay, shared memory, producer, consumers, kernel and launch."""
