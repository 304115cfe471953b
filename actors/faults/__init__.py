"""Who is to blame: where processes stand, their stacks, what they said at their end."""
