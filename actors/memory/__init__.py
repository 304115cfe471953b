"""Memory measurements, and transfers of inputs to a device."""
