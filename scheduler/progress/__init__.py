"""Progress and early end of searches."""
