"""Storage of checkpoints: a folder or a bucket, behind one interface."""
