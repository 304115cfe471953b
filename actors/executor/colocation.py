"""Modules colocated on one rank: their streams and threads, each with its quota.

A module without a partner has the whole device, because limiting it would leave the rest idle.
Works start after all earlier work of the rank's stream, and later work of that stream waits for
them: messages, gradient sums (which hooks do not start meanwhile), and the optimizer. A tensor that
crosses streams is recorded on the stream that reads it. Works that draw random numbers are issued
one after another, because a process has one generator per device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from raymm.actors.quota import (
    Backend,
    ConcurrentModules,
    CudaBackend,
    Output,
    RecordingBackend,
    StreamPool,
    Work,
    check_no_shared_parameters,
)


class Colocation:
    """Runs works of a rank's modules concurrently. All streams are created here, before the first
    step.

    Args:
        sets: for each set of modules that run concurrently, shares of the multiprocessors. Work
            that needs the whole device runs on the rank's own stream.
        timeout: seconds that the works of one group may take.

    Raises:
        PlanError: the device cannot grant the quotas.
        InputError: the device does not support quotas.
    """

    def __init__(
        self, sets: Sequence[Mapping[str, float]], backend: Backend, timeout: float
    ) -> None:
        self._sets = {str(number): dict(quotas) for number, quotas in enumerate(sets)}
        self._pool = StreamPool(backend, self._sets)
        self._concurrent = ConcurrentModules(timeout)

    def check(self, stages: Mapping[str, Sequence[nn.Module]]) -> None:
        """Check that modules with quotas share no parameters or buffers. Raise a ``ValueError`` if
        two modules share a tensor; names it."""
        for quotas in self._sets.values():
            check_no_shared_parameters({module: nn.ModuleList(stages[module]) for module in quotas})

    def run(self, works: Mapping[str, Work], quotas: Mapping[str, float]) -> dict[str, Output]:
        """Run works concurrently; see :meth:`raymm.actors.quota.ConcurrentModules.run`. ``quotas``
        must be contained in one of the sets."""
        name = next(n for n, shares in self._sets.items() if quotas.items() <= shares.items())
        return self._concurrent.run(self._pool.select(name), works)

    @contextmanager
    def on_stream(self, module: str) -> Iterator[None]:
        """Issue the calling thread's work to a module's stream for the length of the block. The
        stream is that of the first set with the module, or the rank's stream if no set has it. The
        block's work is ordered with the work of the rank's stream before and after it."""
        name = next((name for name, quotas in self._sets.items() if module in quotas), None)
        if name is None:
            yield
            return
        streams = self._pool.select(name)
        stream, current = streams.streams[module], streams.backend.current()
        stream.wait(current.record())
        with stream.use():
            yield
        current.wait(stream.record())

    def report(self) -> str:
        """Return the requested and granted quotas, one line per module."""
        return self._pool.report()

    def close(self) -> None:
        self._concurrent.close()
        self._pool.close()


def default_backend(device: torch.device) -> Backend:
    """Return green contexts on CUDA; on a CPU a backend that records usage as if it were an
    H100."""
    return CudaBackend(device) if device.type == "cuda" else RecordingBackend()
