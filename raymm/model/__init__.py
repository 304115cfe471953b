"""Descriptions of models, their losses, and what a batch must be."""
