"""Loops that run in Python first, and in machine code once that is worth compiling.

Compiling takes half a minute on a new machine, and the small plans that most people begin with
take Python a few milliseconds: nobody waits for a compiler that would not save any time. Without
numba all stays in Python.

While a run takes its steps (:func:`compiling_behind`), a thread compiles, and Python computes the
same results meanwhile: no step waits for the compiler.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Spent in Python by one function of one process before it is compiled, or read from numba's
# cache: machine code would have taken a hundredth of it.
PATIENCE_S = 1.0
# How many blocks of this process are within :func:`compiling_behind`.
_behind = 0


@contextmanager
def compiling_behind() -> Iterator[None]:
    """Context manager within which no thread of this process waits for the compiler."""
    global _behind
    _behind += 1
    try:
        yield
    finally:
        _behind -= 1


def _as_it_is(function: Function) -> Function:
    return function


if TYPE_CHECKING:
    entry = part = _as_it_is
else:
    try:
        from numba import njit
        from numba.extending import register_jitable
    except ImportError:  # also numba's own, of a numpy that it does not know
        entry = part = _as_it_is
    else:
        # What compiled code calls; Python calls it as it is. Inlined by nobody but LLVM.
        part = register_jitable

        def entry(function: Function) -> Function:
            """What Python calls; its machine code is kept on disk with all that it calls.

            ``in_python`` and ``in_machine_code`` of it are the two ways.
            """
            machine_code = njit(cache=True)(function)
            spent_s = 0.0
            compiling: dict[tuple, threading.Thread] = {}

            def is_ready(args: tuple) -> bool:
                """Return True if there is machine code for arguments of these types; else have a
                thread compile it."""
                types = tuple(map(machine_code.typeof_pyval, args))
                if types in machine_code.overloads:
                    return True
                if types not in compiling:
                    compiling[types] = threading.Thread(
                        target=machine_code.compile, args=(types,), daemon=True,
                        name=f"compiles {function.__name__}",
                    )
                    compiling[types].start()
                return False

            @functools.wraps(function)
            def tiered(*args):
                nonlocal spent_s
                if spent_s >= PATIENCE_S and (not _behind or is_ready(args)):
                    return machine_code(*args)
                began = time.perf_counter()
                try:
                    return function(*args)
                finally:
                    spent_s += time.perf_counter() - began

            tiered.in_python, tiered.in_machine_code = function, machine_code
            tiered.compiling = compiling
            return tiered
