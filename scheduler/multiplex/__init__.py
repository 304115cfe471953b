"""Sharing of GPUs in time and space: performance model and mapping solver (Mosaic §3)."""
