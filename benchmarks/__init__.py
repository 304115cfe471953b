"""Benchmarks: each is a module run as `python -m benchmarks.NAME --json`."""
