"""Benchmarks: each checks before it times, and writes JSON with its machine, versions, commit and command."""
