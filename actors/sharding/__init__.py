"""A module on several processes: tensor parallelism, FSDP, shares of samples and tokens."""
