"""What a run is doing, what it does after a failure, and how it goes on in the same processes."""
