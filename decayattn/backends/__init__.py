"""How attention runs: registry chooses a backend, tiles says what a tile means, planning finds out what kernels need
to know, runtime gets them to the GPU; portable and hopper are the kernels."""
