"""The process's random number generators, for modules that draw from them in turn.

Neither torch's, nor numpy's, nor Python's default generator is per thread.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def generator_state() -> tuple[bytes, ...]:
    """A value that differs after anything was drawn from torch's default generators.

    Those of numpy and Python are left out: background threads of libraries use them.
    """
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return tuple(state.numpy().tobytes() for state in states)


def seed_generators(seed: int) -> None:
    """Seed torch's default generators, numpy's and Python's: masks of speech models are numpy's.

    Args:
        seed: any whole number; numpy takes its last 32 bits.
    """
    # Not torch.manual_seed: without CUDA it formats a traceback, which takes half a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    seed_beside_torch(seed)


def seed_beside_torch(seed: int) -> None:
    """The part of :func:`seed_generators` that is not about torch's."""
    np.random.seed(seed % 2**32)
    random.seed(seed)


def host_states() -> tuple[object, ...]:
    """Return the states of NumPy's and Python's generators, to compare them."""
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2:], random.getstate()  # few draws change the position only


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Afterwards torch's default generators, numpy's and Python's are as they were before."""
    kept, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    of_devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(kept)
        if of_devices:
            torch.cuda.set_rng_state_all(of_devices)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


class Ticket:
    """One place in a queue for the generators: entered once the one before has been left.

    Args:
        before: whose turn comes first.
        timeout: seconds to wait for it.

    Attributes:
        entered: whether it has been.
    """

    def __init__(self, before: Ticket | None, timeout: float) -> None:
        self._before = before
        self._timeout = timeout
        self._over = threading.Event()
        self.entered = False

    def __enter__(self) -> None:
        before, self._before = self._before, None
        if before is not None and not before._over.wait(self._timeout):
            self._over.set()
            raise TimeoutError(f"random number generators were not free within {self._timeout:g} s")
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self._over.set()
