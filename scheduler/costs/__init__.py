"""Costs of layers: devices, profiles, and recomputation options."""
