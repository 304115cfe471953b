"""The error of what cannot be distributed over the processes of context parallelism."""

from __future__ import annotations

from raymm.errors import InputError


class ContextParallelError(InputError, ValueError):
    """Tokens, sizes or a method that cannot be used. Names the argument, its value and what is
    accepted."""
