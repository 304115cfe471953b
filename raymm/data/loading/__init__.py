"""Ray data workers, and the steps that they build."""
