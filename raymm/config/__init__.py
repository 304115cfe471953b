"""Sections of a configuration, and what is built from them."""
