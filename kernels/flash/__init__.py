"""The attention operator, the inputs and outputs of both backends, and a slow reference."""
