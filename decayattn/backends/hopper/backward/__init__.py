"""The backward: row terms and zeros, work tiles, shared memory, producer, consumers, kernel and launch."""
