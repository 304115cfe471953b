"""Plans: request, search, result, views."""
