"""Split of a sample's tokens over processes, and the resulting traffic of attention."""
