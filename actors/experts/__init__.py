"""Mixtures of experts: routers, their loss, and how many tokens each expert gets."""
