"""Probes of Hugging Face VLMs: their towers, cuts and splits."""
