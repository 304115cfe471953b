"""1F1B on a DAG of stages, lowered for exactly the modalities each microbatch has.

A stage's warm-up depth is its longest path to the loss (Cornstarch v1 §4.1, Fig. 6). A
stage with nothing trainable in it or before it has no backward and no gradient edge
(§4.2); whether something trainable lies before a stage is asked per microbatch, because
a text-only microbatch has no projector before its language model.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raymm.scheduler.plan import Plan, Stage
from raymm.scheduler.program import Instruction, Op, Program

# How many microbatches a stage without backward is planned ahead of its consumer. It keeps
# no activations, only outputs that wait to be received; two hide the jitter between ranks.
# This orders the work of a rank; it does not hold back a rank that has nothing else to do.
RUN_AHEAD = 2

DEFAULT_FORWARD = 1.0
DEFAULT_BACKWARD = 2.0


@dataclass(frozen=True)
class _Active:
    """The part of the stage graph that one microbatch uses."""

    stages: frozenset[str]
    needs_backward: frozenset[str]


def lower_1f1b(
    plan: Plan,
    present: Sequence[Collection[str]],
    costs: Mapping[tuple[str, Op], float] | None = None,
    forward_only: bool = False,
) -> Program:
    """Lower a plan to a 1F1B program for one step.

    Each rank runs, whenever it is free, the ready forward of the oldest microbatch (of two
    stages the one nearest to the loss), else the ready backward of the oldest, and never
    holds more microbatches of a stage than the stage's depth: once a stage is full, each
    backward makes room for one forward. On a chain with one stage per rank and equal costs
    this is textbook 1F1B. Forwards go first because other ranks wait for them; on a rank
    that several stages share, backwards first would drain the pipeline after it.

    Args:
        plan: the plan.
        present: per microbatch, the names of the modules it has input for besides the
            sink (which always runs). Whatever takes their outputs runs as well. A step
            may have fewer microbatches than the plan (the last one of an evaluation).
        costs: seconds per (stage, op), to order work of stages that share a rank or have
            very different speeds; 1 and 2 when not given.
        forward_only: for evaluation: no stage has a backward.

    Returns:
        The program, without collective epilogue.

    Raises:
        ValueError: if ``present`` names a module that the plan does not have.
    """
    cache: dict[frozenset[str], _Active] = {}
    active = []
    for modules in present:
        key = frozenset(modules)
        if key not in cache:
            cache[key] = _active(plan, key, forward_only)
        active.append(cache[key])
    order = _list_schedule(plan, active, costs or {})
    return Program(
        tuple(
            tuple(
                instruction
                for stage, microbatch, backward in tasks
                for instruction in _with_messages(
                    plan, active[microbatch], stage, microbatch, backward
                )
            )
            for tasks in order
        )
    )


def _active(plan: Plan, modules: frozenset[str], forward_only: bool) -> _Active:
    known = {node.name for node in plan.graph.nodes}
    if unknown := modules - known:
        raise ValueError(
            f"a microbatch has input for {sorted(unknown)}; modules are {sorted(known)}"
        )
    running = set(modules)
    for module in plan.graph.topological:
        if module == plan.graph.sink or running.intersection(plan.graph.producers(module)):
            running.add(module)
    run = {s.name for s in plan.stages if s.module in running}
    needs: set[str] = set()
    for stage in plan.topological_stages:
        if stage.name not in run or forward_only:
            continue
        before = [src for src, dst in plan.stage_edges if dst == stage.name]
        if plan.trainable(stage) or any(src in needs for src in before):
            needs.add(stage.name)
    return _Active(frozenset(run), frozenset(needs))


class _StageState:
    """Progress of one stage during list scheduling. Every stage takes its microbatches in
    ascending order, forward and backward, so messages of an edge keep their order."""

    def __init__(self, plan: Plan, stage: Stage, active: Sequence[_Active]) -> None:
        self.stage = stage
        self.name = stage.name
        self.depth = plan.depth[stage.name]
        self.producers = [src for src, dst in plan.stage_edges if dst == stage.name]
        self.consumers = [dst for src, dst in plan.stage_edges if src == stage.name]
        self.forwards = [m for m, a in enumerate(active) if self.name in a.stages]
        self.backwards = [m for m, a in enumerate(active) if self.name in a.needs_backward]
        self.next_forward = 0
        self.next_backward = 0
        self.finished: dict[tuple[bool, int], float] = {}  # (backward?, microbatch) -> time


def _list_schedule(
    plan: Plan, active: Sequence[_Active], costs: Mapping[tuple[str, Op], float]
) -> list[list[tuple[Stage, int, bool]]]:
    states = {stage.name: _StageState(plan, stage, active) for stage in plan.stages}
    on_rank = [[states[s.name] for s in plan.rank_stages(r)] for r in range(plan.num_ranks)]
    order: list[list[tuple[Stage, int, bool]]] = [[] for _ in range(plan.num_ranks)]
    free_at = [0.0] * plan.num_ranks
    events = [(0.0, rank) for rank in range(plan.num_ranks)]
    heapq.heapify(events)
    while events:
        now, rank = heapq.heappop(events)
        while events and events[0] == (now, rank):
            heapq.heappop(events)
        if free_at[rank] > now:
            continue
        choice = _choose(on_rank[rank], states, active, now)
        if choice is None:
            continue  # woken again when something it may wait for finishes
        state, microbatch, backward = choice
        keeps = state.name in active[microbatch].needs_backward
        end = now + max(_cost(costs, state.name, backward, keeps), 1e-9)
        state.finished[backward, microbatch] = end
        if backward:
            state.next_backward += 1
        else:
            state.next_forward += 1
        order[rank].append((state.stage, microbatch, backward))
        free_at[rank] = end
        for other in range(plan.num_ranks):
            heapq.heappush(events, (end, other))
    for state in states.values():
        left = len(state.forwards) - state.next_forward + len(state.backwards) - state.next_backward
        if left:  # cannot happen: every limit is at least one and the graph is acyclic
            raise AssertionError(f"1F1B left {left} task(s) of stage {state.name} unscheduled")
    return order


def _cost(
    costs: Mapping[tuple[str, Op], float], stage: str, backward: bool, keeps: bool
) -> float:
    """Seconds of a task. A stage that was measured under ``no_grad`` only (or only with
    gradients) takes about as long the other way."""
    if backward:
        return costs.get((stage, Op.BACKWARD), DEFAULT_BACKWARD)
    first, second = Op.FORWARD, Op.FORWARD_NO_GRAD
    if not keeps:
        first, second = second, first
    return costs.get((stage, first), costs.get((stage, second), DEFAULT_FORWARD))


def _choose(
    candidates: Sequence[_StageState],
    states: Mapping[str, _StageState],
    active: Sequence[_Active],
    now: float,
) -> tuple[_StageState, int, bool] | None:
    ready_forward = [
        (s.forwards[s.next_forward], s.depth, s)
        for s in candidates
        if s.next_forward < len(s.forwards) and _forward_ready(s, states, active, now)
    ]
    if ready_forward:
        microbatch, _, state = min(ready_forward, key=lambda item: item[:2])
        return state, microbatch, False
    ready_backward = [
        (s.backwards[s.next_backward], -s.depth, s)
        for s in candidates
        if s.next_backward < len(s.backwards) and _backward_ready(s, states, active, now)
    ]
    if ready_backward:
        microbatch, _, state = min(ready_backward, key=lambda item: item[:2])
        return state, microbatch, True
    return None


def _done(state: _StageState, backward: bool, microbatch: int, now: float) -> bool:
    return state.finished.get((backward, microbatch), float("inf")) <= now


def _backward_ready(
    state: _StageState, states: Mapping[str, _StageState], active: Sequence[_Active], now: float
) -> bool:
    microbatch = state.backwards[state.next_backward]
    return _done(state, False, microbatch, now) and all(
        _done(states[consumer], True, microbatch, now) for consumer in state.consumers
    )


def _forward_ready(
    state: _StageState, states: Mapping[str, _StageState], active: Sequence[_Active], now: float
) -> bool:
    microbatch = state.forwards[state.next_forward]
    run = active[microbatch].stages
    if not all(
        _done(states[src], False, microbatch, now) for src in state.producers if src in run
    ):
        return False
    if state.name in active[microbatch].needs_backward:
        started = sum(1 for m in state.backwards if (False, m) in state.finished)
        return started - state.next_backward < state.depth
    ahead = sum(
        1
        for m in state.forwards[: state.next_forward]
        if any((False, m) not in states[dst].finished for dst in state.consumers)
    )
    return ahead < RUN_AHEAD


def _with_messages(
    plan: Plan, active: _Active, stage: Stage, microbatch: int, backward: bool
) -> list[Instruction]:
    """A task with the receives before it and the sends after it. Stages on one rank hand
    tensors over directly and need no message."""
    name = stage.name
    producers = [s for s, d in plan.stage_edges if d == name and s in active.stages]
    consumers = [d for s, d in plan.stage_edges if s == name and d in active.stages]
    if backward:
        op, sources, targets = Op.BACKWARD, consumers, producers
        targets = [target for target in targets if target in active.needs_backward]
    else:
        op = Op.FORWARD if name in active.needs_backward else Op.FORWARD_NO_GRAD
        sources, targets = producers, consumers

    def remote(names: list[str]) -> list[str]:
        return [other for other in names if plan.by_name[other].rank != stage.rank]

    return [
        *(Instruction(Op.RECV, name, microbatch, peer) for peer in remote(sources)),
        Instruction(op, name, microbatch),
        *(Instruction(Op.SEND, name, microbatch, peer) for peer in remote(targets)),
    ]
