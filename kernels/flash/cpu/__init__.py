"""Attention on CPUs: ATen on blocks that a mask has keys in."""
