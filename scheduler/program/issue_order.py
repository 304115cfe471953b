"""Order in which ranks begin communication ahead of need.

Receives are posted early, and gradient sums start while other stages still compute. On a GPU every
such operation is a rendezvous that may delay everything that the same process issues later: streams
share hardware queues, a communicator connects at its first use, and an operation in flight occupies
multiprocessors. Therefore all processes issue their communication in one global order, which
:func:`raymm.scheduler.program.check_program.check_program` creates and proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId

NO_EDGE: Edge = (NO_STAGE, NO_STAGE)


class Issue(NamedTuple):
    """Communication that a rank begins without waiting for its end.

    Attributes:
        before: number of the instruction before which it begins. A gradient sum that this
            instruction completes may begin while the instruction runs.
        edge: edge whose next message is received; :data:`NO_EDGE` for a sum.
        stages: stages whose gradients are summed (:attr:`SharedGradients.stages`).
    """

    before: int
    edge: Edge = NO_EDGE
    stages: tuple[StageId, ...] = ()


class SharedGradients(NamedTuple):
    """Parameters whose gradient is spread over several ranks. ``stages`` have the parameters, in
    the first replica of their module."""

    stages: tuple[StageId, ...]
    ranks: tuple[int, ...]


def shared_gradients(
    held: Iterable[tuple[tuple[StageId, ...], Iterable[int]]]
) -> tuple[SharedGradients, ...]:
    """Merge the groups of processes (stages and ranks) that sum gradients for the same stages."""
    ranks: dict[tuple[StageId, ...], set[int]] = {}
    for stages, holders in held:
        ranks.setdefault(stages, set()).update(holders)
    return tuple(SharedGradients(stages, tuple(sorted(r))) for stages, r in ranks.items())
