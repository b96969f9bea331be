"""The backward: row terms and zeros, its work items, what producer and consumers exchange, the kernel, its launch."""
