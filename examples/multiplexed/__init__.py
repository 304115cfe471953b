"""Models of several towers, multiplexed on shared GPUs."""
