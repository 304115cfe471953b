"""Compiled loops that schedule a step, on arrays."""
