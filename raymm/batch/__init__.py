"""Batches in memory, tried before ranks see them."""
