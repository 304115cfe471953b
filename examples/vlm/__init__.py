"""Tiny models of every kind, to try whole models on a laptop."""
