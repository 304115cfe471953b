"""Models that run on a cluster."""
