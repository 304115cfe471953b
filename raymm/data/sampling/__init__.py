"""Samplers: the selection of samples for each step."""
