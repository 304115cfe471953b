"""Pipeline stages of encoders and language models."""
