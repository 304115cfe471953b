"""Searches for a mapping."""
