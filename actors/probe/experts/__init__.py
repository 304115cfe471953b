"""Trials of mixtures of experts."""
