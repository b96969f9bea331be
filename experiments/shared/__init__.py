"""Modules that all scripts share: options, provenance, reports, worker processes."""
