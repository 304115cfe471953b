"""Stages of encoders and of language models, as ranks run them."""
