"""What runs before and after an attention kernel: the decay's prefix, which tiles are skipped, where sequences lie."""
