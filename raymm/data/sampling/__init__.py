"""Which samples make a step."""
