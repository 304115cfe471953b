"""Work of a module in a stage of the plan, and its output."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.quota.pool import Backend, QuotaStream


@dataclass(frozen=True)
class Output:
    """Output of a module's work, which the device may not have computed yet. Pass ``value`` to
    other :class:`Work`, which then runs after ``event`` on ``stream``."""

    module: str
    value: Any
    stream: QuotaStream
    event: Any
    backend: Backend

    def get(self) -> Any:
        """Return the value for use on the calling thread's current stream: later work of that
        stream runs after the module's work. Does not wait on the host."""
        current = self.backend.current()
        current.wait(self.event)
        current.keep(tensors_in(self.value))
        return self.value


@dataclass(frozen=True)
class Work:
    """Call in the module's own thread, with the module's stream as current stream.

    Attributes:
        run: function that is called with ``consumes`` as positional arguments; it must not wait for
            the device. Gradients are recorded if they are enabled in the submitting thread.
        consumes: inputs: :class:`Output` of earlier stages (passed as their values), or any other
            object. Tensors from another stream must be passed here, not in a closure, because only
            these are ordered and kept alive. Tensors are found in lists, tuples, mappings and
            dataclasses. Detach outputs of other modules in ``run``; a backward would otherwise
            continue into those modules, outside of their stream and quota.
        draws: True if the work may draw random numbers, or save and restore the generators' state
            as ``torch.utils.checkpoint`` does. torch, NumPy and Python have one generator for all
            threads, so such works are *issued* one after another, in the order of the mapping in
            which they are submitted. Numbers then do not depend on thread scheduling; on a GPU the
            kernels still overlap. If several works of one GPU communicate with other GPUs, the
            order must be the same everywhere.
        seed: seeds the generators before the call. Requires ``draws``.
        backward_of: output of the module's forward, if this is its backward. Autograd runs backward
            operators on the *forward's* stream, so both need the same partition.

    Raises:
        ValueError: ``seed`` is given without ``draws``.
    """

    run: Callable[..., Any]
    consumes: tuple[Any, ...] = ()
    draws: bool = True
    seed: int | None = None
    backward_of: Output | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not self.draws:
            raise ValueError(f"seed is {self.seed}, but draws is False; accepted: None")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists, tuples, sets, mappings and dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name))
