"""Placement of a run's processes: node types of the cluster, and one reservation for all
processes."""
