"""Contenders of `benchmarks.pipeline_overhead`, and planners and mappings of other projects."""
