"""Claim: raymm's planner, cost model and simulator reproduce the figures of five papers.

Run with `python -m benchmarks.papers --json`.

Each file has the printed figures of one paper as data, and computes the same figures from data
sheets of the devices, sizes of the models and the described layouts. Nothing is fitted to the
printed figures. If a paper leaves out a quantity, the table names it; figures that depend on it by
a common factor are compared relative to the mean of the table.
"""
