"""Modules and nodes, who reads whom; reading plain data strictly."""
