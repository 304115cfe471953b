"""Low-rank adapters: which linear layers get them, and what these then compute."""
