"""The mathematics of a tile, for every backend: scores and their gradients, decay, visibility."""
