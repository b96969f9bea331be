"""What several scripts share: options, cases, peers, checks, timing, plots, progress, reports, provenance."""
