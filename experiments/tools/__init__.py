"""Tools for work on the kernels: fuzzers, compilers' reports, sanitizers, sweeps."""
