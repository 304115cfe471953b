"""Memory: what storages live, peaks, tensors on their way to a device."""
