"""Integration of raymm's attention into Hugging Face transformers models."""
