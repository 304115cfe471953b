"""Failure diagnosis: progress reports of processes, their stacks, and the kinds of their errors."""
