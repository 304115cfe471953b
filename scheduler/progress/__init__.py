"""How far a search is, and when it ends early."""
