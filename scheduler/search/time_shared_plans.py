"""Plans for fewer ranks than modules: modules take turns on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.layouts import colocated, replicated
from raymm.scheduler.search.partition import Ranges, partition_matrix
from raymm.scheduler.search.stage_space import StageSearchError, StageSpace

SHARED = "encoders share a rank"


def time_shared_plans(space: StageSpace, ranks: int) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of ways to put a model on fewer ranks than it has modules: everything on
    one; every other module on the first rank, beside as much of the language model as keeps
    the ranks balanced; and the layouts that share ranks anyway.

    Args:
        space: its own ``ranks`` do not matter here (a space needs one per module).
        ranks: how many there are.
    """
    graph = space.graph
    if ranks == 1:
        whole = {node.name: ((0, node.num_layers),) for node in graph.nodes}
        yield "everything on one rank", _on_first_rank(space.made_of(whole), graph.sink)
        return
    with suppress(StageSearchError):
        yield SHARED, _colocated_with_language_model(space, ranks)
    for encoder_ranks in range(1, ranks):
        with suppress(StageSearchError):  # not every model can be laid out like that
            yield "colocated", colocated(space, encoder_ranks, ranks - encoder_ranks)
    with suppress(StageSearchError):
        yield "replicated", replicated(space, ranks)


def _colocated_with_language_model(space: StageSpace, ranks: int) -> Plan:
    graph = space.graph
    layers = graph.node(graph.sink).num_layers
    if ranks > layers:
        raise StageSearchError(f"module {graph.sink!r} has only {layers} layers")
    partitions: dict[str, Ranges] = {
        node.name: ((0, node.num_layers),) for node in graph.nodes if node.name != graph.sink
    }
    others = sum(space.stage_seconds(name)[0, hi] for name, ((_, hi),) in partitions.items())
    matrix = space.stage_seconds(graph.sink).copy()
    # The first stage is the only one that starts at layer 0; its rank has the rest to do too.
    matrix[0, 1:] += others
    partitions[graph.sink] = partition_matrix(matrix, ranks, None)
    return _on_first_rank(space.made_of(partitions), graph.sink)


def _on_first_rank(plan: Plan, sink: str) -> Plan:
    """Stages of the sink one per rank, everything else on the first."""
    stages = tuple(
        replace(stage, rank=stage.index if stage.module == sink else 0) for stage in plan.stages
    )
    return replace(plan, stages=stages, shared_ranks=None)
