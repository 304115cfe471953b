"""Attention on CPUs: ATen's kernel on the blocks where a mask has visible keys."""
