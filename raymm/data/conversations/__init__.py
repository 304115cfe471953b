"""Conversations: chat templates, labels, and the inputs that the processor of a model makes."""
