"""Schedules: from a plan to a program, by list scheduling; simulation, memory and lower bounds."""
