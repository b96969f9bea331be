"""Modules of benchmark_context.py: workloads, checks, measuring, report, figure."""
