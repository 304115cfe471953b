"""Reading and writing files of people and of runs."""
