"""The attention operator, what both backends take and give, and a slow reference."""
