"""Search for plans: partitions, stage counts, degrees, layouts."""
