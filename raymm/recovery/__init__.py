"""State machine, failure policy, and in-place recovery of a run."""
