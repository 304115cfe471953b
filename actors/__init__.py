"""What lives in Ray: placement, rank actors, channels, stages, the program executor."""
