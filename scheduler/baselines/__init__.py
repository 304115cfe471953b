"""What raymm is compared with: other people's planners and mappings, behind one interface."""
