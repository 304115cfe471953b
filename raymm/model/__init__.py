"""Descriptions of models, their losses, and rules for batches."""
