"""Lower bounds on a step's time, valid for every schedule of the plan."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.schedule.compiled.arrays import (
    DEPTH,
    F_CHECKPOINTED,
    F_NO_GRAD,
    NEEDS,
    PRODUCER,
    PRODUCERS,
    RECOMPUTES,
    RUN,
    B,
    F,
    R,
)
from raymm.scheduler.schedule.stage_costs import StageCost, stage_costs
from raymm.scheduler.schedule.step_graph import (
    ActiveStages,
    active_stages,
    full_samples,
    full_step,
)
from raymm.scheduler.schedule.step_parts import Part


def lower_bound(
    plan: Plan,
    delays: Mapping[Edge, float] | None = None,
    activation_limits: Mapping[int, float] | None = None,
) -> float:
    """Return a lower bound in seconds for a step with every modality in every microbatch.

    For every rank: its first input arrives no sooner than along the shortest path; then all its
    work takes place; and after its last gradient, the stages before it still have theirs to send.
    The last B_w of a rank may come after its last gradient, but memory limits how many of them can
    wait. Moreover, every microbatch takes at least its own path to the loss and back.

    Args:
        delays: seconds of a message per directed edge; 0 where missing.
        activation_limits: bytes of activations per rank; no limit where missing.
    """
    return _Bound(plan, delays or {}, activation_limits or {}).seconds()


def one_f_one_b_bound(plan: Plan, delays: Mapping[Edge, float] | None = None) -> float:
    """Return a lower bound in seconds for a step under 1F1B, which is above :func:`lower_bound` if
    messages are slow.

    A stage holds at most as many microbatches as its warm-up. So after that many forwards, the next
    one waits for the backward of the first microbatch, which takes a round trip to the loss.

    Args:
        delays: seconds of a message per directed edge; 0 where missing.
    """
    bound = _Bound(plan, delays or {}, {})
    return max(bound.seconds(), bound.round_trips())


class _Bound:
    def __init__(
        self,
        plan: Plan,
        delays: Mapping[Edge, float],
        limits: Mapping[int, float],
    ) -> None:
        self.plan = plan
        self.delays = delays
        self.limits = limits
        self.costs = stage_costs(plan)
        # Microbatches that use the same replicas of all modules are equivalent.
        self.active = tuple(dict.fromkeys(
            active_stages(plan, full_step(plan), samples=full_samples(plan))
        ))
        self.needs = frozenset().union(*(a.needs_backward for a in self.active))
        self.owes = frozenset().union(*(a.needs_input_grad for a in self.active))
        everywhere = frozenset(plan.by_id)
        self.head = self._heads(everywhere)
        self.tail = self._tails(everywhere)
        self.way_back, self.gradient = self._gradients()
        self.rest = self._rests()

    def seconds(self) -> float:
        ranks = range(self.plan.num_ranks)
        return max([self._path(), *(self._rank(rank) for rank in ranks),
            *map(self._last_forward, self.plan.stages)])

    def round_trips(self) -> float:
        """Return the longest chain of round trips to the loss of a stage's microbatches."""
        trip = self._round_trip()
        longest = 0.0
        for name, seconds in trip.items():
            stage, held = self.plan.by_id[name], self.plan.warm_up[name]
            count = self.plan.num_microbatches // len(self.plan.replicas(stage.module))
            # The chain's first trip follows `extra` forwards.
            trips, extra = divmod(count - 1, held)
            tail = self.tail[name] if name in self.owes else 0.0
            row = extra * self.costs[name].forward + (trips + 1) * seconds if count else 0.0
            longest = max(longest, self.head[name] + row + tail)
        return longest

    def _round_trip(self) -> dict[StageId, float]:
        """Return the least time from a stage's forward to the end of the same microbatch's
        backward."""
        trip: dict[StageId, float] = {}
        for stage in reversed(self.plan.topological_stages):
            if stage.id not in self.needs:
                continue
            beyond: dict[str, float] = {}
            for consumer in self.plan.stage_consumers[stage.id]:
                if consumer not in trip:  # a replica without microbatches
                    continue
                downstream = self._delay(stage.id, consumer) + trip[consumer]
                downstream += self._delay(consumer, stage.id)
                module = self.plan.by_id[consumer].module
                beyond[module] = min(beyond.get(module, downstream), downstream)
            cost = self.costs[stage.id]
            recompute = cost.forward if stage.recompute else 0.0
            stage_seconds = cost.forward + recompute + cost.backward_input + cost.backward_weight
            trip[stage.id] = stage_seconds + max(beyond.values(), default=0.0)
        return trip

    def _delay(self, src: StageId, dst: StageId) -> float:
        same = self.plan.by_id[src].rank == self.plan.by_id[dst].rank
        return 0.0 if same else self.delays.get((src, dst), 0.0)

    def _heads(self, run: frozenset[StageId]) -> dict[StageId, float]:
        """Return the earliest arrival of each stage's first input, if only ``run`` is active."""
        head: dict[StageId, float] = {}
        for stage in self.plan.topological_stages:
            # Only one replica of a producer delivers the first microbatch.
            by_module: dict[str, float] = {}
            for producer in self.plan.stage_producers[stage.id]:
                if producer not in run:
                    continue
                arrival = (
                    head[producer] + self.costs[producer].forward
                    + self._delay(producer, stage.id)
                )
                module = self.plan.by_id[producer].module
                by_module[module] = min(by_module.get(module, arrival), arrival)
            head[stage.id] = max(by_module.values(), default=0.0)
        return head

    def _tails(self, run: frozenset[StageId]) -> dict[StageId, float]:
        """Return the least time of ``run`` after each stage has sent its last gradient."""
        tail: dict[StageId, float] = {}
        for stage in self.plan.topological_stages:
            owed: dict[str, float] = {}
            for producer in self.plan.stage_producers[stage.id]:
                if producer not in run or producer not in self.needs:
                    continue
                cost = self.costs[producer]
                remaining = (
                    self._delay(stage.id, producer) + cost.backward_input
                    + max(cost.backward_weight, tail[producer])
                )
                module = self.plan.by_id[producer].module
                owed[module] = min(owed.get(module, remaining), remaining)
            tail[stage.id] = max(owed.values(), default=0.0)
        return tail

    def _path(self) -> float:
        """Return the longest path of any microbatch to a loss and back."""
        longest = 0.0
        for active in self.active:
            heads, tails = self._heads(active.stages), self._tails(active.stages)
            for stage in self.plan.stages:
                if stage.id in active.stages and not self.plan.stage_consumers[stage.id]:
                    head, tail = heads[stage.id], tails[stage.id]
                    last = self.costs[stage.id].backward_weight
                    occupied = self._once(stage, active)
                    longest = max(longest, head + max(occupied, occupied - last + tail))
        return longest

    def _once(self, stage: Stage, active: ActiveStages) -> float:
        """Return the seconds of a stage's work on one microbatch that passes through it."""
        cost = self.costs[stage.id]
        if stage.id not in active.needs_backward:
            return cost.forward
        recompute = cost.forward if stage.recompute else 0.0
        return cost.forward + recompute + cost.backward_input + cost.backward_weight

    def _rank(self, rank: int) -> float:
        stages = self.plan.rank_stages(rank)
        work, waiting, tails = 0.0, 0.0, [math.inf]
        for stage in stages:
            active = next((a for a in self.active if stage.id in a.stages), None)
            if active is None:
                continue
            count = self._count(stage)
            work += count * self._once(stage, active)
            if stage.id in active.needs_input_grad:
                tails.append(self.tail[stage.id])
                cost = self.costs[stage.id]
                waiting += self._can_wait(stage, cost, count) * cost.backward_weight
            else:  # no stage waits for its gradient
                tails.append(0.0)
        head = min((self.head[s.id] for s in stages), default=0.0)
        busy = max(work, work - waiting + min(tails))
        if len(stages) != 1 or stages[0].id not in self.way_back:
            return head + busy
        (stage,) = stages
        room = self._room(stage)
        return max(head + self._idle(stage, room) + busy, self._row_of_trips(stage, room))

    def _room(self, stage: Stage) -> int:
        """Return the number of microbatches that a rank with only this stage can hold."""
        count, cost = self._count(stage), self.costs[stage.id]
        held = cost.input_bytes if stage.recompute else cost.activation_bytes
        if stage.rank not in self.limits or not held:
            return count
        return int(min(count, max(1, self.limits[stage.rank] * (1 + 1e-9) / held)))

    def _idle(self, stage: Stage, room: int) -> float:
        """Return the least idle time of a rank with one stage before its first gradient arrives."""
        cost = self.costs[stage.id]
        early = room * cost.forward
        if stage.recompute:
            resident = float(room)
            if stage.rank in self.limits and cost.activation_bytes >= max(1, cost.input_bytes):
                free = self.limits[stage.rank] * (1 + 1e-9) - room * cost.input_bytes
                resident = min(resident, max(free, cost.activation_bytes) / cost.activation_bytes)
            early += resident * cost.forward
        return max(0.0, self.gradient[stage.id] - self.head[stage.id] - early)

    def _last_forward(self, stage: Stage) -> float:
        """Return the earliest end of the step after the stage's last forward, which waits for
        room."""
        if not (count := self._count(stage)):
            return 0.0
        cost, waiting = self.costs[stage.id], 0.0
        if stage.id in self.way_back and len(self.plan.rank_stages(stage.rank)) == 1:
            room = self._room(stage)
            recompute = cost.forward if stage.recompute else 0.0
            waiting = (count - room) * (recompute + cost.backward_input + cost.backward_weight)
            waiting += self._idle(stage, room) if count > room else 0.0
        return self.head[stage.id] + waiting + count * cost.forward + self.rest[stage.id]

    def _rests(self) -> dict[StageId, float]:
        """Return the seconds from the end of each stage's forward until its microbatch is
        finished."""
        remaining: dict[StageId, float] = {}
        for stage in reversed(self.plan.topological_stages):
            if not self._count(stage):
                continue
            ways: dict[str, float] = {}
            for consumer in self.plan.stage_consumers[stage.id]:
                if consumer not in remaining:  # a replica without microbatches
                    continue
                module = self.plan.by_id[consumer].module
                way = self._delay(stage.id, consumer)
                way += self.costs[consumer].forward + remaining[consumer]
                ways[module] = min(ways.get(module, way), way)
            remaining[stage.id] = max(ways.values(), default=0.0)
            if stage.id in self.needs:
                cost = self.costs[stage.id]
                recompute = cost.forward if stage.recompute else 0.0
                tail = self.tail[stage.id] if stage.id in self.owes else 0.0
                way_back = max(recompute, self.way_back[stage.id]) + cost.backward_input
                way_back += max(cost.backward_weight, tail)
                remaining[stage.id] = max(remaining[stage.id], way_back)
        return remaining

    def _row_of_trips(self, stage: Stage, room: int) -> float:
        """Return the earliest end of a rank with one stage that holds ``room`` microbatches: each
        batch of them waits for a round trip to the loss."""
        cost = self.costs[stage.id]
        way_back = max(self.way_back[stage.id], cost.forward if stage.recompute else 0.0)
        trip = cost.forward + way_back + cost.backward_input
        trips, extra = divmod(self._count(stage) - 1, room)
        tail = self.tail[stage.id] if stage.id in self.owes else 0.0
        row = extra * cost.forward + trips * (trip + cost.backward_weight) + trip
        return self.head[stage.id] + row + max(cost.backward_weight, tail)

    def _count(self, stage: Stage) -> int:
        """Return the number of microbatches that pass through a stage."""
        replicas = len(self.plan.replicas(stage.module))
        return len(range(stage.replica, self.plan.num_microbatches, replicas))

    def _gradients(self) -> tuple[dict[StageId, float], dict[StageId, float]]:
        """Return, for stages with a backward, the least time from a forward to its gradient, and
        the earliest arrival of the first gradient."""
        beyond: dict[StageId, float] = {}
        first: dict[StageId, float] = {}
        for stage in reversed(self.plan.topological_stages):
            if stage.id not in self.needs or not self._count(stage):
                continue
            ways: dict[str, float] = {}
            firsts: dict[str, float] = {}
            for consumer in self.plan.stage_consumers[stage.id]:
                if consumer not in beyond:  # a replica without microbatches
                    continue
                cost, module = self.costs[consumer], self.plan.by_id[consumer].module
                recompute = cost.forward if self.plan.by_id[consumer].recompute else 0.0
                back = cost.backward_input + self._delay(consumer, stage.id)
                way = self._delay(stage.id, consumer) + cost.forward
                way += max(recompute, beyond[consumer]) + back
                arrival = max(
                    self.head[consumer] + cost.forward + recompute, first[consumer]
                ) + back
                ways[module] = min(ways.get(module, way), way)
                firsts[module] = min(firsts.get(module, arrival), arrival)
            beyond[stage.id] = max(ways.values(), default=0.0)
            first[stage.id] = max(firsts.values(), default=0.0)
        return beyond, first

    def _can_wait(self, stage: Stage, cost: StageCost, count: int) -> int:
        """Return how many B_w of a stage can come after its last B_d."""
        if stage.rank not in self.limits or not cost.activation_bytes:
            return count
        room = self.limits[stage.rank] * (1 + 1e-9) / cost.activation_bytes
        return int(min(count, max(1, room)))


def least_seconds(plan: Plan, parts: Sequence[Part]) -> float:
    """Return a lower bound of the seconds of a step, with the loads of its microbatches, in any
    order of the microbatches and any schedule: the work of the busiest rank, after the shortest
    path to it. Ranks with the same stages of all replicas may exchange work, so their mean counts.
    ``parts`` are those of the step without messages."""
    work: dict[int, float] = {}
    arrival: dict[int, float] = {}
    total = 0.0
    for part in parts:
        arrays = part.arrays
        runs, trains = (arrays.uses & RUN) > 0, (arrays.uses & NEEDS) > 0
        amounts = arrays.amounts[:, :, None]
        recomputes = arrays.stages[:-1, RECOMPUTES, None] > 0
        forwards = np.where(trains, np.where(
            recomputes, amounts[:, F_CHECKPOINTED], amounts[:, F]
        ), amounts[:, F_NO_GRAD]) * runs * arrays.loads
        backwards = (amounts[:, B] + recomputes * amounts[:, R]) * trains * arrays.loads
        before = np.zeros(arrays.uses.shape)
        for index in np.argsort(-arrays.stages[:-1, DEPTH], kind="stable").tolist():
            first, end = arrays.stages[index : index + 2, PRODUCERS]
            for producer in arrays.edges[first:end, PRODUCER].tolist():
                reached = (before[producer] + forwards[producer]) * runs[producer]
                before[index] = np.maximum(before[index], reached)
        for stage, row, path, run in zip(
            part.stages, (forwards + backwards).sum(axis=1), before, runs, strict=True
        ):
            work[stage.rank] = work.get(stage.rank, 0.0) + float(row)
            if run.any():
                shortest = float(path[run].min())
                arrival[stage.rank] = min(arrival.get(stage.rank, shortest), shortest)
        total += float((forwards + backwards).sum())
    least = total / plan.num_ranks
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in work:
        key = tuple(sorted((stage.module, stage.index) for stage in plan.rank_stages(rank)))
        groups.setdefault(key, []).append(rank)
    for key, ranks in groups.items():
        if all(len(plan.replicas(module)) == len(ranks) for module, _ in key):
            mean = sum(work[rank] for rank in ranks) / len(ranks)
            least = max(least, mean + min(arrival.get(rank, 0.0) for rank in ranks))
    return least
