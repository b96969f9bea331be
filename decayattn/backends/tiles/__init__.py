"""What a tile means, for every backend: scores and their gradients, the decay of rows and keys, who sees whom."""
