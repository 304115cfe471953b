"""A module taken apart: blocks, cuts, merging, projectors, messages, random draws."""
