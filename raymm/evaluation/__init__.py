"""Evaluation by what a model writes: prompts, metrics of texts, and a table of them."""
