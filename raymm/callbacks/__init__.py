"""Watching a run from outside: callbacks, and adapters of loggers."""
