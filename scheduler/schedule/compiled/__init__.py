"""Schedules of a step in compiled loops, on arrays."""
