"""What a probe raises."""

from raymm.errors import InputError


class ProbeError(InputError, ValueError):
    """A model that cannot be cut into stages, or shared out, with the reason."""


class NotRunError(ProbeError):
    """A model whose forward does not run as stages run it."""
