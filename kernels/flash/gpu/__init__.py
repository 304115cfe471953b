"""Attention on GPUs: Triton kernels and the tables of work that they read."""
