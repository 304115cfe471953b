"""What mappings are compared with."""
