"""Can a model be cut, masked, sharded? Tried on a small copy."""
