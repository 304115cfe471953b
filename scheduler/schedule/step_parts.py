"""Independent parts of a plan's step, as arrays. Replicas of a whole pipeline are parts and mostly
equal, so that results are computed once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.stage_samples import carried_samples
from raymm.scheduler.schedule.compiled.arrays import NEEDS, OWES, RUN, StepArrays
from raymm.scheduler.schedule.compiled.replay import TransferArrays
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedule.step_graph import ActiveStages

OPS = (
    Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED, Op.RECOMPUTE, Op.BACKWARD,
    Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT,
)

# Defaults for stages without known costs: a backward takes twice as long as a forward, and a
# forward keeps much more than its input.
UNKNOWN_FORWARD, UNKNOWN_BACKWARD = 1.0, 2.0
UNKNOWN_SIZES = StageCost(0.0, 0.0, 0.0, input_bytes=1, activation_bytes=16)

Loads = Mapping[str, Sequence[float] | np.ndarray]
"""Factors of seconds and bytes of every microbatch, by module; 1 for missing modules."""

# A lower limit of task times; otherwise a rank could begin tasks forever at one instant.
SHORTEST = 1e-9


@dataclass(frozen=True)
class Part:
    """Stages that depend on each other or share ranks, and the microbatches that use them.

    Attributes:
        ranks, microbatches: numbers in the plan, by their numbers in the arrays.
        arrays: stages, ranks and microbatches by number.
        edges: the plan's data edges, in the order of the arrays.
    """

    stages: tuple[Stage, ...]
    ranks: tuple[int, ...]
    microbatches: tuple[int, ...]
    arrays: StepArrays
    edges: tuple[Edge, ...]

    def op_array(self, costs: Mapping[tuple[StageId, Op], float]) -> np.ndarray:
        """Return the (S, 7) seconds by operation; missing ones are 0."""
        return np.array([[costs.get((s.id, op), 0.0) for op in OPS] for s in self.stages], float)

    def transfer_arrays(self, transfers: Mapping[Edge, Transfer]) -> TransferArrays:
        """Return the times of messages; missing ones are 0."""
        none = Transfer()
        forward = [transfers.get(edge, none) for edge in self.edges]
        backward = [transfers.get((dst, src), none) for src, dst in self.edges]
        return TransferArrays(
            np.array([[t.seconds for t in way] for way in (forward, backward)], dtype=float),
            np.array([[t.latency for t in way] for way in (forward, backward)], dtype=float),
        )


def parts_of(
    plan: Plan,
    active: Sequence[ActiveStages],
    costs: Mapping[tuple[StageId, Op], float],
    sizes: Mapping[StageId, StageCost],
    delays: Mapping[Edge, float],
    loads: Loads,
) -> list[Part]:
    """Return the parts of a step, starting with the part of the plan's first stage. ``costs``
    (seconds) and ``sizes`` (bytes) are as far as known; ``delays`` are seconds of a message per
    directed edge, 0 where missing; ``loads`` are factors of seconds and bytes of every microbatch,
    by module, 1 where missing."""
    kinds = list({id(a): a for a in active}.values())
    numbers = {id(a): number for number, a in enumerate(kinds)}
    kind_of = np.array([numbers[id(a)] for a in active], dtype=np.int64)
    return [
        loaded(_part(plan, stages, kinds, kind_of, costs, sizes, delays), loads)
        for stages in _connected(plan)
    ]


def _connected(plan: Plan) -> Iterator[list[Stage]]:
    """Yield the groups of stages that edges or ranks connect."""
    parent: dict[object, object] = {}

    def root(node: object) -> object:
        while (above := parent.setdefault(node, node)) != node:
            parent[node] = node = parent[above]
        return node

    for stage in plan.stages:
        parent[root(stage.id)] = root(stage.rank)
    for src, dst in plan.stage_edges:
        parent[root(src)] = root(dst)
    groups: dict[object, list[Stage]] = {}
    for stage in plan.stages:
        groups.setdefault(root(stage.id), []).append(stage)
    yield from groups.values()


def _part(
    plan: Plan, stages: Sequence[Stage], kinds: Sequence[ActiveStages], kind_of: np.ndarray,
    costs: Mapping[tuple[StageId, Op], float], sizes: Mapping[StageId, StageCost],
    delays: Mapping[Edge, float],
) -> Part:
    """Return the part of these stages, with loads of 1; ``kind_of`` has the number of the kind of
    each microbatch."""
    ids = [stage.id for stage in stages]
    present = [at for at, kind in enumerate(kinds) if not kind.stages.isdisjoint(ids)]
    microbatches = np.flatnonzero(np.isin(kind_of, present))
    column_of = {number: index for index, number in enumerate(present)}
    columns = [column_of[number] for number in kind_of[microbatches]]
    kinds = [kinds[number] for number in present]
    number = {name: index for index, name in enumerate(ids)}
    ranks = sorted({stage.rank for stage in stages})
    rank_number = {rank: index for index, rank in enumerate(ranks)}
    modules = {node.name: index for index, node in enumerate(plan.graph.nodes)}
    cost = [sizes.get(name, UNKNOWN_SIZES) for name in ids]

    def members(attribute: str) -> np.ndarray:
        names = [getattr(kind, attribute) for kind in kinds]
        table = np.array([[name in active for active in names] for name in ids], dtype=bool)
        return np.ascontiguousarray(table.reshape(len(ids), len(names))[:, columns])

    uses = (
        members("stages") * RUN + members("needs_backward") * NEEDS
        + members("needs_input_grad") * OWES
    ).astype(np.uint8)
    forwards, backwards = (uses & RUN) > 0, (uses & NEEDS) > 0
    producers = [[number[p] for p in plan.stage_producers[name]] for name in ids]
    consumers = [_by_rank(plan, name, number) for name in ids]
    edges = [(p, c) for c, incoming in enumerate(producers) for p in incoming]
    edge_number = {edge: index for index, edge in enumerate(edges)}
    by_producer = [(p, c) for p, outgoing in enumerate(consumers) for c in outgoing]
    names = [(ids[p], ids[c]) for p, c in edges]
    consumer_modules = np.zeros((len(ids), len(modules)), dtype=bool)
    for p, c in edges:
        consumer_modules[p, modules[stages[c].module]] = True
    on_rank = [[number[s.id] for s in plan.rank_stages(rank)] for rank in ranks]
    columns_of_stages = [
        [rank_number[s.rank] for s in stages], [modules[s.module] for s in stages],
        [plan.depth[name] for name in ids], [plan.warm_up[name] for name in ids],
        [s.recompute for s in stages], [plan.trainable(s) for s in stages],
    ]
    offsets = [
        _starts(forwards.sum(axis=1)), forwards.sum() + _starts(backwards.sum(axis=1)),
        _starts(map(len, producers)), _starts(map(len, consumers)),
    ]
    arrays = StepArrays(
        np.array([*([*column, 0] for column in columns_of_stages), *offsets], dtype=np.int64)
        .T.copy(),
        np.array([
            [
                *_seconds(stage.id, costs),
                size.input_bytes if stage.recompute else size.activation_bytes,
                size.activation_bytes if stage.recompute else 0, stage.quota or 0,
            ]
            for stage, size in zip(stages, cost, strict=True)
        ], dtype=float),
        uses,
        np.concatenate([forwards.nonzero()[1], backwards.nonzero()[1]]).astype(np.int64),
        np.array([
            [p, c, edge_number[edge]]
            for (p, _), edge in zip(edges, by_producer, strict=True) for c in edge[1:]
        ], dtype=np.int64).reshape(-1, 3),
        np.array([c for _, c in edges], dtype=np.int64),
        np.ascontiguousarray(_carried(plan, names, kinds)[:, columns]),
        np.array([
            [delays.get((src, dst), 0.0), delays.get((dst, src), 0.0)] for src, dst in names
        ], dtype=float).reshape(-1, 2),
        consumer_modules,
        _starts(map(len, on_rank)),
        np.array([stage for rank_stages in on_rank for stage in rank_stages], dtype=np.int64),
        np.ones((len(stages), len(microbatches))),
    )
    return Part(
        tuple(stages), tuple(ranks), tuple(microbatches.tolist()), arrays, tuple(names)
    )


def _by_rank(plan: Plan, name: StageId, number: Mapping[StageId, int]) -> list[int]:
    """Return the consumers of a stage, grouped by rank."""
    consumers = plan.stage_consumers[name]
    ranks = list(dict.fromkeys(plan.by_id[c].rank for c in consumers))
    return [number[c] for c in sorted(consumers, key=lambda c: ranks.index(plan.by_id[c].rank))]


def _carried(plan: Plan, edges: Sequence[Edge], kinds: Sequence[ActiveStages]) -> np.ndarray:
    """Return (E, kinds) bool, True if an edge carries data to another rank."""
    split = plan.splits_samples
    return np.array([
        [
            src in uses.stages and dst in uses.stages
            and uses.carries(plan.edge_ports[src, dst])
            and (not split or bool(carried_samples(plan, src, [dst], uses.samples)))
            for uses in kinds
        ]
        if plan.by_id[src].rank != plan.by_id[dst].rank else [False] * len(kinds)
        for src, dst in edges
    ], dtype=bool).reshape(len(edges), len(kinds))


def loaded(part: Part, loads: Loads) -> Part:
    """Return a part with other loads of its microbatches."""
    columns = np.array(part.microbatches, dtype=np.int64)
    rows = {name: _loads(loads, name, columns) for name in {s.module for s in part.stages}}
    factors = np.array([rows[stage.module] for stage in part.stages], dtype=float)
    return replace(part, arrays=part.arrays._replace(loads=factors))


def _loads(
    loads: Loads, module: str, microbatches: np.ndarray
) -> np.ndarray:
    factors = loads.get(module)
    if factors is None:
        return np.ones(len(microbatches))
    return np.asarray(factors, dtype=float)[microbatches]


def _starts(lengths: Iterable[int]) -> np.ndarray:
    return np.array([0, *accumulate(lengths)], dtype=np.int64)


def _seconds(stage: StageId, costs: Mapping[tuple[StageId, Op], float]) -> list[float]:
    """Return the seconds by operation, as far as measured. A forward that was measured only with or
    only without gradients takes about as long the other way."""

    def seconds(*ops: Op, default: float) -> float:
        measured = (costs[stage, op] for op in ops if (stage, op) in costs)
        return max(next(measured, default), SHORTEST)

    f, n, c = Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED
    forward = seconds(f, c, n, default=UNKNOWN_FORWARD)
    no_grad = seconds(n, c, f, default=UNKNOWN_FORWARD)
    recompute = seconds(Op.RECOMPUTE, f, c, n, default=UNKNOWN_FORWARD)
    keys = [(stage, op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    measured = all(key in costs for key in keys)
    total = sum(costs[key] for key in keys) if measured else UNKNOWN_BACKWARD
    backward = seconds(Op.BACKWARD, default=total)
    backward_input = seconds(Op.BACKWARD_INPUT, default=backward / 2)
    weight = seconds(Op.BACKWARD_WEIGHT, default=backward - backward_input)
    return [forward, no_grad, forward, recompute, backward, backward_input, weight]
