"""A plan of a pipeline: stages, ranks, processes, who sends what to whom."""
