"""Modules of length_extrapolation.py: options, training, reading, processes, results, figure."""
