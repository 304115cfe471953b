"""Hugging Face VLMs on Ray actors."""
