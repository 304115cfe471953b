"""Modules colocated on one rank: their streams and threads, each with its quota.

A module without a partner has the whole device, because a fraction of a GPU beside an idle rest
helps nobody. Works begin after what the rank's stream was given, and what comes after waits for
their events: messages, sums of gradients (which hooks do not start meanwhile), the optimizer.
Tensors that cross streams are recorded on the one that reads them. Works that draw random numbers
are issued one after another, as a process has one generator per device.
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
    """Runs works of a rank's modules concurrently. All streams are made here, before the first
    step.

    Args:
        sets: shares of the multiprocessors, by module, of every set of modules that run
            concurrently. What needs the whole device runs on the rank's own stream.
        backend: makes the streams.
        timeout: seconds that the works of one group may take.

    Raises:
        PlanError: quotas that the device cannot grant.
        InputError: a device without quotas.
    """

    def __init__(
        self, sets: Sequence[Mapping[str, float]], backend: Backend, timeout: float
    ) -> None:
        self._sets = {str(number): dict(quotas) for number, quotas in enumerate(sets)}
        self._pool = StreamPool(backend, self._sets)
        self._concurrent = ConcurrentModules(timeout)

    def check(self, stages: Mapping[str, Sequence[nn.Module]]) -> None:
        """Modules with quotas must have no parameter or buffer in common.

        Args:
            stages: by module.

        Raises:
            ValueError: two have one in common, by name.
        """
        for quotas in self._sets.values():
            check_no_shared_parameters(
                {module: nn.ModuleList(stages[module]) for module in quotas}
            )

    def run(self, works: Mapping[str, Work], quotas: Mapping[str, float]) -> dict[str, Output]:
        """Run works concurrently; as :meth:`raymm.actors.quota.ConcurrentModules.run`.

        Args:
            works: by module.
            quotas: of these modules, as one of the sets has them.
        """
        name = next(n for n, own in self._sets.items() if quotas.items() <= own.items())
        return self._concurrent.run(self._pool.select(name), works)

    @contextmanager
    def on_stream(self, module: str) -> Iterator[None]:
        """Within, the calling thread issues to the stream of a module, of the first set that has
        one; else to the rank's stream. Ordered after what the rank's stream was given before, and
        before what that stream is given afterwards.

        Args:
            module: name of any module of the rank.
        """
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
        """What was asked and granted, a line per module."""
        return self._pool.report()

    def close(self) -> None:
        """End threads and streams."""
        self._concurrent.close()
        self._pool.close()


def default_backend(device: torch.device) -> Backend:
    """Green contexts on CUDA; on a CPU books of who ran when, as if it were an H100."""
    return CudaBackend(device) if device.type == "cuda" else RecordingBackend()
