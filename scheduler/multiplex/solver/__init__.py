"""Search algorithms for mappings."""
