"""What a model costs: counted, estimated, or read from a profile."""
