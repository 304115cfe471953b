"""Attention of tokens that several processes have: gathered, in a ring, by heads."""
