"""The actor of a rank, groups of them, and profilers."""
