"""Random calls of decay_attention, and what is right for them: what fuzz_kernels.py is made of."""
