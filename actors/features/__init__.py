"""Cache of frozen encoders' features: storage, and computation per item."""
