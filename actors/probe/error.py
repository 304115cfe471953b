"""What a probe raises."""

from collections.abc import Mapping
from typing import Any

from raymm.errors import InputError


class ProbeError(InputError, ValueError):
    """A model that cannot be cut into stages, or shared out, with the reason."""


class NotRunError(ProbeError):
    """A model whose forward does not run as stages run it."""


class NotTakenError(NotRunError):
    """Inputs that a copy of an encoder does not take.

    Attributes:
        inputs: keyword arguments.
    """

    def __init__(self, message: str, inputs: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.inputs = inputs or {}
