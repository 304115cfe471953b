"""The trainer, its loop, and how plans of either style run in it."""
