"""Decisions as data: plans, schedules, programs, timelines. No Ray, no torch."""
