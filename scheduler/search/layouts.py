"""Layouts: ways to assign the stages of a model to ranks. Each returns a Plan that runs.

- modality parallel (Cornstarch v1 §4.1): every stage of every module has a separate rank;
  :meth:`raymm.scheduler.search.stage_space.StageSpace.plan`, or :func:`chunked` for several stages
  of a module per rank;
- encoders colocated (Megatron style): one chain, whose first ranks each hold a stage of every
  encoder; modules after the language model are whole on its last rank;
- encoders replicated (Llama style): every rank of the language model, or a window of its ranks,
  holds all encoders whole. Llama's cross-attention needs the features on every rank and encodes
  each image on all of them; here the replicas split the microbatches.

The two layouts that share ranks may have degrees if they are those of all modules: replicas of all
modules are equal parts of the plan, and all stages on a rank have its processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from raymm.errors import NoPlanError
from raymm.plural import plural
from raymm.scheduler.graph.module_graph import ModuleGraph
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.search.partition import Ranges, partition_matrix
from raymm.scheduler.search.stage_space import StageSpace


def chunked(space: StageSpace, counts: Mapping[str, int], chunks: int) -> Plan:
    """Return an interleaved plan: a module with several ranks has ``chunks`` stages on each of them
    (Megatron's virtual pipeline stages). The pipeline fills and drains in smaller steps, at the
    cost of more messages. ``counts`` has the ranks per module.

    Modules with a single rank, with a layer that has no backward (after the first), or with too few
    layers keep one stage per rank.

    Raises:
        NoPlanError: no module can have so many chunks, or a module not so many stages.
    """
    graph = space.graph
    if chunks < 2:
        raise NoPlanError(f"chunks is {chunks}; it must be at least 2")
    partitions: dict[str, Ranges] = {}
    any_chunked = False
    for node in graph.nodes:
        ranks = counts[node.name]
        _check_stages(graph, node.name, ranks)
        worthwhile = ranks > 1 and all(space.backward[node.name][1:])
        many = chunks if worthwhile and node.num_layers >= chunks * ranks else 1
        any_chunked |= many > 1
        partitions[node.name] = partition_matrix(
            space.stage_seconds(node.name), ranks * many, None
        )
    if not any_chunked:
        raise NoPlanError(f"no module can have {chunks} chunks on each of its ranks")
    plan = space.made_of(partitions)
    first, stages = 0, []
    for module in graph.topological:
        for stage in plan.module_stages(module):
            stages.append(replace(stage, rank=first + stage.index % counts[module]))
        first += counts[module]
    return replace(plan, stages=tuple(stages), shared_ranks=None)


def colocated(space: StageSpace, encoder_ranks: int, language_ranks: int) -> Plan:
    """Return a plan in Megatron style: all encoders concurrently on the first ranks, stage by
    stage, then the language model (or the module that the encoders feed). An encoder with fewer
    layers than ranks uses the last encoder ranks, next to its consumer.

    Raises:
        NoPlanError: the model is not encoders that feed one module, or that module has fewer layers
            than ranks.
    """
    graph = space.graph
    encoders = encoders_into_backbone(graph)
    if encoder_ranks < 1:
        raise NoPlanError(f"encoder_ranks is {encoder_ranks}; it must be at least 1")
    _check_stages(graph, graph.backbone, language_ranks)
    counts = {name: min(encoder_ranks, graph.node(name).num_layers) for name in encoders}
    partitions = {name: ((0, graph.node(name).num_layers),) for name in graph.followers} | {
        name: partition_matrix(space.stage_seconds(name), count, None)
        for name, count in {**counts, graph.backbone: language_ranks}.items()
    }
    plan = space.made_of(partitions)

    def rank(stage: Stage) -> int:
        if stage.module == graph.backbone:
            return encoder_ranks + stage.index
        if stage.module in graph.followers:
            return encoder_ranks + language_ranks - 1
        return encoder_ranks - counts[stage.module] + stage.index

    used = sorted({rank(stage) for stage in plan.stages})
    stages = tuple(replace(s, rank=used.index(rank(s))) for s in plan.stages)
    return replace(plan, stages=stages, shared_ranks=None)


def replicated(
    space: StageSpace, ranks: int, windows: Mapping[str, range] | None = None
) -> Plan:
    """Return a plan in Llama style: the language model over all ranks, and on each of them a
    replica of every encoder, which processes its share of the microbatches. The language model has
    fewer layers on ranks with more work of other modules.

    Args:
        ranks: stages of the language model. The ``ranks`` of the space are ignored.
        windows: consecutive ranks with replicas, for each module before the language model; by
            default all ranks for all encoders.

    Raises:
        NoPlanError: without ``windows``, the model is not encoders that feed one module; or that
            module has fewer layers than ranks.
    """
    graph = space.graph
    if windows is None:
        windows = dict.fromkeys(encoders_into_backbone(graph), range(ranks))
    _check_stages(graph, graph.backbone, ranks)
    # More replicas than microbatches would have nothing to do.
    microbatches = space.num_microbatches // space.parts
    shared = {name: window[:microbatches] for name, window in windows.items()}
    shared |= {name: range(ranks - 1, ranks) for name in graph.followers}
    partitions: dict[str, Ranges] = {
        name: ((0, graph.node(name).num_layers),) for name in shared
    }
    added = np.zeros(ranks)
    for name, window in shared.items():
        added[window.start : window.stop] += space.stage_seconds(name)[0, -1] / len(window)
    seconds = space.stage_seconds(graph.backbone)
    partitions[graph.backbone] = partition_matrix(seconds + added[:, None, None], ranks)
    plan = space.made_of(partitions)
    stages = [
        replace(stage, rank=rank, replica=replica)
        for name, window in shared.items()
        for replica, rank in enumerate(window)
        for stage in plan.module_stages(name)
    ]
    stages += [replace(s, rank=s.index) for s in plan.module_stages(graph.backbone)]
    return replace(plan, stages=tuple(stages), shared_ranks=None)


def _check_stages(graph: ModuleGraph, module: str, stages: int) -> None:
    layers = graph.node(module).num_layers
    if not 1 <= stages <= layers:
        raise NoPlanError(
            f"module {module!r} cannot have {plural(stages, 'stage')}; it has "
            f"{plural(layers, 'layer')}"
        )


def encoders_into_backbone(graph: ModuleGraph) -> list[str]:
    """Return the encoders that feed the backbone; raise ``NoPlanError`` if there are none, or a
    module before the backbone is not such an encoder."""
    after = {graph.backbone, *graph.followers}
    encoders = [node.name for node in graph.nodes if node.name not in after]
    for name in encoders:
        if graph.consumers(name) != (graph.backbone,) or graph.producers(name):
            raise NoPlanError(
                f"this layout is for encoders that feed {graph.backbone!r} only; {name!r} does not"
            )
    if not encoders:
        raise NoPlanError("this layout is for models with encoders; there are none")
    return encoders
