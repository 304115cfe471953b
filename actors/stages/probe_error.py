"""What a probe raises."""


class ProbeError(ValueError):
    """A model that cannot be cut into stages, or shared out, with the reason."""
