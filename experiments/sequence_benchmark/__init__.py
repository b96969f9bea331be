"""Modules of benchmark_sequences.py: packed sequences, decoding, generation, report, figure."""
