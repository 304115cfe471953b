"""Trials on small copies that show how a model can be cut, masked and sharded."""
