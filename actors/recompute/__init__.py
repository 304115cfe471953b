"""Layers that are run again in the backward pass, and activations kept on the host."""
