"""Whole models on several processes: whose tokens, rows and items are whose."""
