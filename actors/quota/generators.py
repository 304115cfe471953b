"""Random number generators of the process, for modules that use them one after another.

The default generators of torch, NumPy and Python are not per thread.
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
    """Return a value that changes when numbers are drawn from torch's default generators. NumPy's
    and Python's are excluded, because background threads of libraries use them."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states += torch.cuda.get_rng_state_all()
    return tuple(state.numpy().tobytes() for state in states)


def seed_generators(seed: int) -> None:
    """Seed the default generators of torch, NumPy (masks of speech models) and Python with any
    integer; NumPy uses its last 32 bits."""
    # Not torch.manual_seed: without CUDA it formats a traceback, which takes half a millisecond.
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    seed_beside_torch(seed)


def seed_beside_torch(seed: int) -> None:
    np.random.seed(seed % 2**32)
    random.seed(seed)


def host_states() -> tuple[object, ...]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2:], random.getstate()  # a few draws change the position only


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the default generators of torch, NumPy and Python at the end of the block."""
    torch_state, numpy_state, python_state = (
        torch.get_rng_state(), np.random.get_state(), random.getstate()
    )
    device_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if device_states:
            torch.cuda.set_rng_state_all(device_states)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


class Ticket:
    """Position in a queue for the generators. It can be entered once the ticket ``before`` was
    left, within ``timeout`` seconds."""

    def __init__(self, before: Ticket | None, timeout: float) -> None:
        self._before = before
        self._timeout = timeout
        self._over = threading.Event()
        self.entered = False

    def __enter__(self) -> None:
        predecessor, self._before = self._before, None
        if predecessor is not None and not predecessor._over.wait(self._timeout):
            self._over.set()
            raise TimeoutError(f"random number generators were not free within {self._timeout:g} s")
        self.entered = True

    def __exit__(self, *_: object) -> None:
        self._over.set()
