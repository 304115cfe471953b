"""Parts of modules: blocks, cuts, merge policies, projectors, messages and random draws."""
