"""Attention over tokens of several processes: by gathering, in a ring, or by heads."""
