"""The version of raymm."""

__version__ = "0.1.0"
