"""Module graphs, sample ranges and strict reading of plain data."""
