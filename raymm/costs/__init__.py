"""Costs of models: counted, estimated, or read from a profile."""
