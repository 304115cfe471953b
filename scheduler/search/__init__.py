"""Plans that are searched for: partitions, stage counts, degrees, layouts."""
