"""Evaluation of the texts that a model generates: prompts, text metrics, and a table of results."""
