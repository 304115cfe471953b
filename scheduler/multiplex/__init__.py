"""Temporal and spatial sharing of GPUs: performance model and mapping solver (Mosaic §3)."""
