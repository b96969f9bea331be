"""The rooms of benchmark_attention.py: cases, peers, checks, measurement, report, figure."""
