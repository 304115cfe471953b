"""Where a run's processes are placed: which nodes there are or may come, one reservation of all."""
