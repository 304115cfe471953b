"""Stages: how a rank gets its part of a module, and how that part runs a microbatch."""
