"""What a rank begins with other ranks before it needs it, and where among its instructions.

Receives are posted ahead of need, and sums of gradients start while other stages still compute. On
a GPU every such operation is a rendezvous that may hold up whatever is issued after it on the same
process: streams share hardware queues, a communicator connects at its first use, an operation
under way holds multiprocessors. So all processes issue what they have with one another in one
order, which :func:`raymm.scheduler.program.check_program.check_program` makes and proves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from raymm.scheduler.plan.stage import NO_STAGE, Edge, StageId

NO_EDGE: Edge = (NO_STAGE, NO_STAGE)


class Issue(NamedTuple):
    """Something that a rank begins, and does not wait for.

    Attributes:
        before: number of the instruction before which it begins; a sum of gradients that the
            instruction itself completes may begin while that runs.
        edge: whose next message is to be received; :data:`NO_EDGE` if it is a sum.
        stages: whose gradients are to be summed (:attr:`SharedGradients.stages`).
    """

    before: int
    edge: Edge = NO_EDGE
    stages: tuple[StageId, ...] = ()


class SharedGradients(NamedTuple):
    """Parameters with parts of their gradient on several ranks.

    Attributes:
        stages: that have the parameters, in the first replica of their module.
        ranks: that hold them.
    """

    stages: tuple[StageId, ...]
    ranks: tuple[int, ...]


def shared_gradients(
    held: Iterable[tuple[tuple[StageId, ...], Iterable[int]]]
) -> tuple[SharedGradients, ...]:
    """What is held by the same stages, as one.

    Args:
        held: stages and ranks of every group of processes that sums gradients.
    """
    ranks: dict[tuple[StageId, ...], set[int]] = {}
    for stages, holders in held:
        ranks.setdefault(stages, set()).update(holders)
    return tuple(SharedGradients(stages, tuple(sorted(r))) for stages, r in ranks.items())
