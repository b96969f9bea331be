"""Launches before and after an attention kernel: the decay's prefix, the plan of skipped tiles, sequence offsets."""
