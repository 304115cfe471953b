"""Instructions per rank, the proof that they end, and the times they took."""
