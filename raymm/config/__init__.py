"""Sections of a configuration, and construction of models and plans from them."""
