"""Conversion of rows to samples: configuration, media, text, limits, and collation."""
