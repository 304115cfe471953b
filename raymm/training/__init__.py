"""Trainer, training loop, and execution of plans."""
