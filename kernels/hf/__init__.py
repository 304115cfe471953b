"""Where attention is put into transformers' models."""
