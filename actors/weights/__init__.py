"""Where the weights of a module come from."""
