"""Programs carried out: instructions compiled, channels, clocks, colocated work."""
