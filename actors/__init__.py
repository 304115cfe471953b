"""Runtime on Ray: placement, rank actors, channels, stages, the program executor."""
