"""Text generation in stages of a language model."""
