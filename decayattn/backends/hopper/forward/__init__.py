"""The forward: its work items, what producer and consumers exchange, the kernel, its launch."""
