"""The trainer, its loop, and how plans run in it."""
