"""Sources of module weights."""
