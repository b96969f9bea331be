"""Modules that all scripts share: options, plots, provenance, reports, worker processes."""
