"""From a row to a sample: media, text, limits, collation."""
