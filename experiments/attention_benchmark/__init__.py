"""Modules of benchmark_attention.py: launches, report, figure."""
