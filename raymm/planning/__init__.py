"""Planning of a run: the request, the search and its results."""
