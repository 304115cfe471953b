"""Hugging Face VLMs on several processes: distribution of tokens, rows and items."""
