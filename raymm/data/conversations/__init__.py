"""Conversations: chat templates, labels, and the inputs that a model's processor makes."""
