"""The attention mask: its table, how masks are made and converted, its picture, its tiles."""
