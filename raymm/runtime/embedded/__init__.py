"""A Ray of this machine for one driver, of which nothing outlives it."""
