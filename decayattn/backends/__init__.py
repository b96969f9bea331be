"""Backends: registry chooses one, tiles defines the mathematics of a tile, planning computes the kernels' metadata,
runtime launches them; portable and hopper hold the kernels."""
