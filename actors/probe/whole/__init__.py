"""Whole models: where their towers are, and how they and the language model are cut."""
