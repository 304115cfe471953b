"""Measurement of layers, scaling surfaces and plans."""
