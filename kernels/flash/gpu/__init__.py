"""Attention on GPUs: Triton kernels and their work tables."""
