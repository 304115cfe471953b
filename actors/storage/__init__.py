"""Where checkpoints are: a folder or a bucket, behind one interface."""
