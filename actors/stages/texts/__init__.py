"""Stages of a language model that write texts."""
