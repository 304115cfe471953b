"""Compilation of loops with numba if it is installed; without it they run in Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def compiled(function: Function) -> Function: ...

else:
    try:
        from numba import njit
    except ImportError:  # also raised by numba for an unsupported numpy

        def compiled(function: Function) -> Function:
            """Return the function uncompiled, which is about a hundred times slower."""
            return function
    else:
        compiled = njit(cache=True)
