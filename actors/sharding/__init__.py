"""Modules on several processes: tensor parallelism, FSDP, and splits of samples and tokens."""
