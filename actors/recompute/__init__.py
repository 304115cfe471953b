"""Recomputation of layers in the backward pass, and offloading of activations to the host."""
