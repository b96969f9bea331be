"""What several scripts share: options, cases, peers, checks, timing, progress, reports and their provenance."""
