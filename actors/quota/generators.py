"""The process's random number generators, for modules that draw from them in turn.

Neither torch's, nor numpy's, nor Python's default generator is per thread.
"""

from __future__ import annotations

import threading

import torch


def generator_state() -> tuple[bytes, ...]:
    """A value that differs after anything was drawn from torch's default generators.

    Those of numpy and Python are left out: background threads of libraries use them.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return tuple(state.numpy().tobytes() for state in states)


class Turn:
    """One place in a queue for the generators: entered once the one before has been left.

    Args:
        before: whose turn comes first.
        timeout: seconds to wait for it.
    """

    def __init__(self, before: Turn | None, timeout: float) -> None:
        self._before = before
        self._timeout = timeout
        self._over = threading.Event()

    def __enter__(self) -> None:
        before, self._before = self._before, None
        if before is not None and not before._over.wait(self._timeout):
            self._over.set()
            raise TimeoutError(f"random number generators were not free within {self._timeout:g} s")

    def __exit__(self, *_: object) -> None:
        self._over.set()
