"""The contenders of `benchmarks.pipeline_overhead`, one file each."""
