"""Actors that run a multiplexed program: one process per GPU, modules concurrently."""
