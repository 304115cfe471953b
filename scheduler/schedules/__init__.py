"""Schedules: the order in which each rank runs the tasks of a step, one class per file."""
