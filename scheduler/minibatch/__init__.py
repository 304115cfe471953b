"""Balanced steps and microbatches, from sample sizes or measured costs."""
