"""Pipeline plans: stages, ranks, processes, and messages between them."""
