"""Conversations with media, as a whole model's own processor makes inputs of them."""
