"""Modules of benchmark_training.py: the model, the attentions that are compared, checks and clocks, the report."""
