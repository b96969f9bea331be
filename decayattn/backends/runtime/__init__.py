"""How a kernel gets to the GPU: launches, addresses that the copy engine takes, the buffers of results."""
