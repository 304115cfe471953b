"""Files of users and of runs: configurations, outputs, leases."""
