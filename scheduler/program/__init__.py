"""Instructions per rank, the proof that they end, and measured times."""
