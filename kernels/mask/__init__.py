"""The attention mask: its table, builders and conversions, its picture and its tiles."""
