"""Models that run on a Ray cluster."""
