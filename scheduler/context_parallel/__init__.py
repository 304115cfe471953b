"""Which process has which of a sample's tokens, and what attention then sends."""
