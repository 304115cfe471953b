"""Loops in machine code where numba is installed; the same loops in Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def compiled(function: Function) -> Function: ...

else:
    try:
        from numba import njit
    except ImportError:  # also numba's own, of a numpy that it does not know

        def compiled(function: Function) -> Function:
            """The function as it is: a hundred times slower."""
            return function
    else:
        compiled = njit(cache=True)
