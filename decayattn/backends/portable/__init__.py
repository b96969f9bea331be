"""Triton kernels for every CUDA GPU, and for Triton's interpreter on a CPU."""
