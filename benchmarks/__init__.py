"""Benchmarks of raymm's claims. Run each with `python -m benchmarks.NAME --json`."""
