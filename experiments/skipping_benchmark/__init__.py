"""Modules of benchmark_skipping.py: workloads, checks, report, figure."""
