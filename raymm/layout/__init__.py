"""Conversion of layouts to stages: builders, parameter ownership and checks of plans."""
