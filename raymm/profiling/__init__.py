"""Layers, surfaces and plans, measured."""
