"""Observation of a run: metrics, progress, reports, balance, drift."""
