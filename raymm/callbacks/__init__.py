"""Callbacks for monitoring a run, and adapters for loggers."""
