"""Plans for fewer ranks than modules, in which modules take turns on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.layouts import colocated, replicated
from raymm.scheduler.search.stage_space import StageSpace

SHARED = "encoders share a rank"


def time_shared_plans(space: StageSpace, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of ways to put a model on fewer ranks than modules: everything on one
    rank; all other modules on the first rank and those after the language model on the last, with
    as much of the language model as balances the ranks; and the layouts that share ranks anyway.
    The ``ranks`` of the space, one per module, are ignored."""
    graph = space.graph
    after = {graph.backbone, *graph.followers}
    first = {node.name: range(1) for node in graph.nodes if node.name not in after}
    if ranks == 1:
        yield "everything on one rank", replicated(space, 1, first)
        return
    with suppress(NoPlanError):
        yield SHARED, replicated(space, ranks, first)
    for encoder_ranks in range(1, ranks):
        with suppress(NoPlanError):  # not every model has this layout
            yield "colocated", colocated(space, encoder_ranks, ranks - encoder_ranks)
    with suppress(NoPlanError):
        yield "replicated", replicated(space, ranks)
