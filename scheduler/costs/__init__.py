"""What layers cost: devices, profiles, options of recomputation."""
