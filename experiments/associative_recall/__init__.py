"""Modules of recall.py: the task, the models, their training, the report."""
