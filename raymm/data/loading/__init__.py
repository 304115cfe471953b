"""Data workers, and what they build."""
