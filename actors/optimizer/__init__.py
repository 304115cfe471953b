"""Sums of gradients, updates, what is not finite, shards of checkpoints."""
