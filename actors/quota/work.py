"""What a module does in a stage of the plan, and what it hands on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.quota.backend import Backend, QuotaStream


@dataclass(frozen=True)
class Output:
    """What a module's work returned. The device may not have computed it yet.

    Attributes:
        module: whose it is.
        value: what the work returned; for other :class:`Work`, which is ordered after it.
        stream: that computes it.
        event: on that stream, after the work.
        backend: of the stream.
    """

    module: str
    value: Any
    stream: QuotaStream
    event: Any
    backend: Backend

    def get(self) -> Any:
        """The value, for the calling thread's current stream: what is issued to that from now
        on runs after the work. Does not wait on the host."""
        current = self.backend.current()
        current.wait(self.event)
        current.keep(tensors_in(self.value))
        return self.value


@dataclass(frozen=True)
class Work:
    """One call, in the module's own thread, with the module's stream as current stream.

    Attributes:
        run: the call. It gets ``consumes`` as positional arguments, and must not wait for the
            device. Gradients are recorded if they are where the work is submitted.
        consumes: what it reads: :class:`Output` of earlier stages (handed on as their values),
            or anything else. Tensors that were made on another stream must be here, not in a
            closure: only those here are ordered and kept alive. Tensors are found in
            lists, tuples, mappings and dataclasses. What another module computed should be
            detached in ``run``: a backward goes through everything that is not, also through
            modules whose turn, stream and quota this is not.
        draws: it may draw random numbers, or save and restore the generators' state as
            ``torch.utils.checkpoint`` does: torch, numpy and Python have one generator for all
            threads. Such works are *issued* one after another, in the order of the mapping they
            are submitted in, so that numbers do not depend on how threads take turns; on a GPU
            their kernels overlap nevertheless. Where several works of one GPU talk to other
            GPUs, that order must be the same everywhere.
        seed: the generators are seeded with this before the call. Implies ``draws``.
        backward_of: the module's forward, where this is its backward. Autograd runs backward
            operators on the *forward's* stream, so that both need the same partition.
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
    """All tensors in nested lists, tuples, mappings and dataclasses."""
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
