"""Low-rank adapters of linear layers, and the choice of the layers."""
