"""What is seen of a run: metrics, progress, reports, balance, drift."""
