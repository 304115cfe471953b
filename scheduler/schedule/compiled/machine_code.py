"""Loops that run in Python at first, and in machine code once compiling pays off.

Compiling takes half a minute on a new machine, so small plans that take milliseconds in Python are
not compiled. Without numba everything stays in Python. During training steps
(:func:`compiling_behind`), a thread compiles while Python computes the same results, so no step
waits.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Seconds that one function may spend in Python, per process, before it is compiled or read from
# numba's cache. Machine code would have taken a hundredth of that.
PATIENCE_S = 1.0
# Number of active :func:`compiling_behind` blocks in this process.
_behind = 0


@contextmanager
def compiling_behind() -> Iterator[None]:
    """Keep threads of this process from waiting for the compiler inside the block."""
    global _behind
    _behind += 1
    try:
        yield
    finally:
        _behind -= 1


def _as_it_is(function: Function) -> Function:
    return function


if TYPE_CHECKING:
    entry = part = allocating_part = _as_it_is
else:
    try:
        from numba import njit
        from numba.extending import register_jitable
    except ImportError:  # numba raises it too, for unsupported numpy versions
        entry = part = allocating_part = _as_it_is
    else:
        # Compiled code inlines these functions (LLVM decides); Python calls them directly. They
        # neither allocate nor count references to arrays, which would take most of their time.
        part = register_jitable(_nrt=False)
        allocating_part = register_jitable

        def entry(function: Function) -> Function:
            """Decorate a function that Python calls. Its machine code and that of its callees is
            cached on disk; ``in_python`` and ``in_machine_code`` give access to both versions."""
            machine_code = njit(cache=True)(function)
            spent_s = 0.0
            compiling: dict[tuple, threading.Thread] = {}

            def is_ready(args: tuple) -> bool:
                """Return True if machine code for these argument types exists; else start a thread
                that compiles it."""
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
