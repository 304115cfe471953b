"""What a probe raises."""


class ProbeError(ValueError):
    """A model that cannot be cut into stages, or shared out, with the reason."""


class NotRunError(ProbeError):
    """A model whose forward does not run as stages run it."""
