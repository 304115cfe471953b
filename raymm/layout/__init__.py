"""From layouts to stages: builders, ownership of parameters, checks of plans."""
