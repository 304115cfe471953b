"""Decisions as data: plans, schedules, programs, timelines. Does not import Ray or torch."""
