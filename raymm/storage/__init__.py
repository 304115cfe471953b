"""Checkpoints, manifests, exports, and what a run that goes on may change."""
