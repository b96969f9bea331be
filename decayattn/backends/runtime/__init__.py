"""Kernel launches: launch caching, tensor arguments, TMA requirements, the buffers of results."""
