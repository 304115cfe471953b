"""Checkpoints, manifests, exports, and rules for resumed runs."""
