"""Checks of batches before they are sent to ranks."""
