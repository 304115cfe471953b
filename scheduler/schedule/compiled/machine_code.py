"""Loops in machine code where numba is installed; the same loops in Python where it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def _as_it_is(function: Function) -> Function:
    """A hundred times slower."""
    return function


if TYPE_CHECKING:
    entry = part = _as_it_is
else:
    try:
        from numba import njit
    except ImportError:  # also numba's own, of a numpy that it does not know
        entry = part = _as_it_is
    else:
        # What Python calls; kept on disk with all that it calls.
        entry = njit(cache=True)
        # What only compiled code calls: no wrapper for Python, which takes long to compile.
        part = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)
