"""Plans for fewer ranks than modules, in which modules take turns on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from raymm.errors import NoPlanError
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.search.layouts import colocated, replicated
from raymm.scheduler.search.partition import Ranges, partition_matrix
from raymm.scheduler.search.stage_space import StageSpace

SHARED = "encoders share a rank"


def time_shared_plans(space: StageSpace, ranks: int) -> Iterator[tuple[str, Plan]]:
    """Yield (name, plan) of ways to put a model on fewer ranks than modules: everything on one
    rank; all other modules on the first rank and those after the language model on the last, with
    as much of the language model as balances the ranks; and the layouts that share ranks anyway.
    The ``ranks`` of the space, one per module, are ignored."""
    graph = space.graph
    if ranks == 1:
        whole = {node.name: ((0, node.num_layers),) for node in graph.nodes}
        yield "everything on one rank", _placed(space.made_of(whole), graph)
        return
    with suppress(NoPlanError):
        yield SHARED, _colocated_with_language_model(space, ranks)
    for encoder_ranks in range(1, ranks):
        with suppress(NoPlanError):  # not every model has this layout
            yield "colocated", colocated(space, encoder_ranks, ranks - encoder_ranks)
    with suppress(NoPlanError):
        yield "replicated", replicated(space, ranks)


def _colocated_with_language_model(space: StageSpace, ranks: int) -> Plan:
    graph = space.graph
    name, layers = graph.backbone, graph.node(graph.backbone).num_layers
    if ranks > layers:
        raise NoPlanError(f"module {name!r} has only {layers} layers")
    partitions: dict[str, Ranges] = {
        node.name: ((0, node.num_layers),) for node in graph.nodes if node.name != name
    }
    first = last = 0.0
    for other, ((_, hi),) in partitions.items():
        seconds = space.stage_seconds(other)[0, hi]
        first, last = (first, last + seconds) if other in graph.followers else (
            first + seconds, last
        )
    matrix = space.stage_seconds(name).copy()
    # The ranks of the first and the last stage also run the other modules.
    matrix[0, 1:] += first
    matrix[:layers, layers] += last
    partitions[name] = partition_matrix(matrix, ranks, None)
    return _placed(space.made_of(partitions), graph)


def _placed(plan: Plan, graph: ModuleGraph) -> Plan:
    """Place the stages of the backbone one per rank, its followers on the last rank, and all other
    modules on the first."""
    last = len(plan.module_stages(graph.backbone)) - 1
    ranks = {name: last for name in graph.followers}
    stages = tuple(
        replace(s, rank=s.index if s.module == graph.backbone else ranks.get(s.module, 0))
        for s in plan.stages
    )
    return replace(plan, stages=stages, shared_ranks=None)
