"""Devices that stand in for GPUs: emulated and pretended ones, and stages that sleep."""
