"""List scheduling of a step: every rank, when free, takes the best task that it can start.

:class:`~raymm.scheduler.schedules.policy.Rules` define the parts of a backward and the memory
limits, and a :class:`~raymm.scheduler.schedules.policy.Policy` defines the best task. Times equal
those that the simulator finds for the result.

On a rank with quotas, further tasks may start together with the best one: for each other module
with a quota, the best task of the same kind that could start too. (Quotas are chosen so that
forwards of the modules take about equally long, and backwards as well.) A task that starts alone
gets the whole device, except a backward whose forward ran on a quota: autograd runs it on the same
quota.

Independent parts (replicas of a whole pipeline) are scheduled separately, and equal parts once.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raymm.errors import NoPlanError
from raymm.scheduler.graph.module_graph import MESSAGE_BOUND
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.compiled.arrays import RANK, RuleArrays, StepArrays
from raymm.scheduler.schedule.compiled.replay import activation_peaks, replay
from raymm.scheduler.schedule.compiled.run import run_schedule
from raymm.scheduler.schedule.network import Transfer
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedule.step_graph import ActiveStages
from raymm.scheduler.schedule.step_parts import OPS, UNKNOWN_SIZES, Loads, Part, parts_of
from raymm.scheduler.schedules.base import Task
from raymm.scheduler.schedules.policy import FILLS_BUBBLES, Policy, Rules, TaskOrder

# Relative error of sums of seconds in different orders.
ROUNDING = 1e-9


class ListScheduler:
    """List scheduler for one step.

    Args:
        active: stages that each microbatch uses.
        costs: seconds per (stage, compute op), as far as known.
        sizes: bytes per stage; missing stages are taken to be equal.
        delays: seconds of a message per directed edge (gradients use the reversed data edge); 0
            where missing.
        loads: factors of seconds and bytes of every microbatch, by module; 1 where missing.
    """

    def __init__(
        self,
        plan: Plan,
        active: Sequence[ActiveStages],
        costs: Mapping[tuple[StageId, Op], float],
        sizes: Mapping[StageId, StageCost] | None = None,
        delays: Mapping[Edge, float] | None = None,
        loads: Loads | None = None,
    ) -> None:
        self.plan = plan
        self.active = active
        self.costs = costs
        self.sizes = sizes or {}
        self.delays = delays or {}
        self.loads = loads or {}

    @cached_property
    def parts(self) -> list[Part]:
        """Independent parts of the step."""
        return parts_of(
            self.plan, self.active, self.costs, self.sizes, self.delays, self.loads
        )

    def run(self, rules: Rules, until: float = float("inf")) -> StepSchedule:
        """Schedule all tasks; raise ``NoPlanError`` if a rank reaches its byte limit and
        deadlocks.

        Args:
            until: seconds after which the schedule is of no interest: one whose program certainly
                takes longer may have infinite seconds and lack tasks. Only for rules with a policy,
                without separate weight gradients and early recomputations.
        """
        policy, limits = rules.policy, rules.byte_limits
        on_quota = any(stage.quota is not None for stage in self.plan.stages)
        latest = float("inf") if on_quota else until * (1 + ROUNDING)
        results: dict[object, PartSchedule] = {}
        schedules = []
        for part, key in zip(self.parts, self._keys, strict=True):
            rank_limits = [] if limits is None else [limits[rank] for rank in part.ranks]
            ahead = self._ahead(part, policy) if rules.order is None else np.array(
                [rules.order.ahead[stage.id] for stage in part.stages], dtype=np.int64
            )
            keys, phases = _order_arrays(part, rules.order)
            cache_key = key, *rank_limits, ahead.tobytes(), keys.tobytes(), phases.tobytes()
            if cache_key not in results:
                log, makespan, unfinished = run_schedule(_timed(part, rules.order), RuleArrays(
                    np.array(policy.priority, dtype=np.int64), float(policy.patience), policy.hops,
                    policy.beyond_depth, rules.flush, rules.split, rules.early_recompute,
                    np.array(rank_limits, dtype=float), ahead, keys, phases,
                    FILLS_BUBBLES,
                ), latest)
                if makespan == float("inf"):
                    return StepSchedule((), (), makespan)
                self._check_finished(part, unfinished, rules)
                results[cache_key] = PartSchedule.of(
                    part.arrays.stages[:-1, RANK], log, float(makespan)
                )
            schedules.append(results[cache_key])
        makespan = max((part.makespan for part in schedules), default=0.0)
        return StepSchedule(tuple(self.parts), tuple(schedules), makespan, rules.early_recompute)

    @cached_property
    def num_tasks(self) -> int:
        """Number of forwards and backwards that one run schedules, without repeated equal parts."""
        kinds = dict(zip(self._keys, self.parts, strict=True))
        return sum(len(part.arrays.microbatches) for part in kinds.values())

    def _ahead(self, part: Part, policy: Policy) -> np.ndarray:
        """Return the (S,) limits of held microbatches of a part's stages; 0 if the policy has
        none."""
        if not policy.ahead:
            return np.zeros(len(part.stages), dtype=np.int64)
        by_module = {
            node.name: held for node, held in zip(self.plan.graph.nodes, policy.ahead, strict=True)
        }
        return np.array([by_module[s.module][s.index] for s in part.stages], dtype=np.int64)

    @cached_property
    def _keys(self) -> list[int]:
        """Key of each part. Parts with the same key have the same schedules."""
        numbers: dict[tuple[object, ...], int] = {}
        return [
            numbers.setdefault(
                tuple((array.shape, array.tobytes()) for array in part.arrays), len(numbers)
            )
            for part in self.parts
        ]

    def replayed(
        self,
        schedule: StepSchedule,
        transfers: Mapping[Edge, Transfer] | None = None,
        costs: Mapping[tuple[StageId, Op], float] | None = None,
    ) -> float:
        """Return the seconds of a schedule's program according to the simulator. They may be less
        than the schedule's, because a program never waits on purpose.

        Args:
            transfers: times of messages; by default the delays of the schedule.
            costs: seconds by stage and operation; by default those of the schedule.
        """
        if transfers is None:
            transfers = {edge: Transfer(0.0, wait) for edge, wait in self.delays.items()}
        posted = self.plan.posted_receives
        last, delayed = self._replayed(schedule, transfers, costs, MESSAGE_BOUND, 1)
        if last < 0:
            last, _ = self._replayed(schedule, transfers, costs, sys.maxsize, 1)
        elif delayed and posted > 1:
            last, _ = self._replayed(schedule, transfers, costs, MESSAGE_BOUND, posted)
        return last

    def _replayed(
        self, schedule: StepSchedule, transfers: Mapping[Edge, Transfer],
        costs: Mapping[tuple[StageId, Op], float] | None, bound: int, posted: int,
    ) -> tuple[float, bool]:
        """Return the seconds (negative for a deadlock), and whether ``bound`` made a sender
        wait."""
        results: dict[object, tuple[float, bool]] = {}
        last, delayed = 0.0, False
        for part, result in zip(schedule.parts, schedule.results, strict=True):
            seconds = part.arrays.amounts if costs is None else part.op_array(costs)
            messages = part.transfer_arrays(transfers)
            arrays = seconds, part.arrays.loads, *messages
            key = (id(result), *(array.tobytes() for array in arrays))
            if key not in results:
                results[key] = replay(
                    part.arrays, result.log, result.starts, schedule.early, seconds, messages,
                    bound, posted,
                )
            end, waited = results[key]
            if end < 0:
                assert bound < sys.maxsize, "deadlock: the ranks of a schedule wait for each other"
                return float(end), True
            last, delayed = max(last, float(end)), delayed or bool(waited)
        return last, delayed

    def activation_peaks(self, schedule: StepSchedule) -> tuple[int, ...]:
        """Return the peak bytes of activations of each rank under a schedule of this scheduler."""
        peaks = [0] * self.plan.num_ranks
        for part, result in zip(schedule.parts, schedule.results, strict=True):
            costs = [self.sizes.get(stage.id, UNKNOWN_SIZES) for stage in part.stages]
            sizes = np.array([
                [c.input_bytes, c.activation_bytes, c.remade_bytes] for c in costs
            ], dtype=np.int64)
            most = activation_peaks(part.arrays, result.log, result.starts, *sizes.T.copy())
            for rank, peak in zip(part.ranks, most.tolist(), strict=True):
                peaks[rank] = peak
        return tuple(peaks)

    def _check_finished(self, part: Part, left: np.ndarray, rules: Rules) -> None:
        for stage, count in zip(part.stages, left.tolist(), strict=True):
            if count and rules.byte_limits is not None:
                raise NoPlanError(
                    f"activation limits {rules.byte_limits} leave no room for {count} task(s) of "
                    f"stage {stage.id}; a rank needs room for one microbatch"
                )
            if count:  # cannot happen: every limit is at least one and the graph is acyclic
                raise AssertionError(f"{count} task(s) of stage {stage.id} are unscheduled")


def _order_arrays(part: Part, order: TaskOrder | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the keys and phases of a part's tasks; empty without an order."""
    if order is None:
        return np.zeros((0, 0, 0)), np.zeros((0, 0, 0), dtype=np.int64)
    columns = list(part.microbatches)
    forward, backward, weight = np.array(
        [np.asarray(order.keys[s.id], dtype=float)[:, columns] for s in part.stages]
    ).transpose(1, 0, 2)
    keys = np.ascontiguousarray([forward, backward, backward, weight])
    if not order.phases:
        return keys, np.zeros((0, 0, 0), dtype=np.int64)
    phases = np.array([np.asarray(order.phases[s.id])[:, columns] for s in part.stages])
    return keys, np.ascontiguousarray(phases.transpose(1, 0, 2), dtype=np.int64)


def _timed(part: Part, order: TaskOrder | None) -> StepArrays:
    """Return the arrays of a part with the seconds that an order is made for."""
    if order is None or not order.seconds:
        return part.arrays
    amounts = part.arrays.amounts.copy()
    for row, stage in zip(amounts, part.stages, strict=False):
        forward, backward = order.seconds[stage.id]
        row[: len(OPS)] = forward, forward, forward, forward, backward, backward / 2, backward / 2
    return part.arrays._replace(amounts=amounts, loads=np.ones_like(part.arrays.loads))


class PartSchedule(NamedTuple):
    """Tasks of a part of a step.

    Attributes:
        log: (tasks, 4) int64, stage, microbatch, operation and group of every task, rank by rank,
            in order.
        starts: (ranks + 1,) offset of each rank's tasks.
        makespan: seconds until the last task ends.
    """

    log: np.ndarray
    starts: np.ndarray
    makespan: float

    @classmethod
    def of(cls, stage_ranks: np.ndarray, log: np.ndarray, makespan: float) -> PartSchedule:
        """Return the schedule of tasks in the order in which they begin. ``stage_ranks`` is
        (stages,)."""
        small = stage_ranks.astype(np.min_scalar_type(stage_ranks.max()))  # sorts in linear time
        ranks = small[log[:, 0]]
        order = np.argsort(ranks, kind="stable")
        starts = np.searchsorted(ranks[order], np.arange(stage_ranks.max() + 2))
        return cls(log[order], starts, makespan)


@dataclass(frozen=True)
class StepSchedule:
    """Tasks of a step, by part, and the seconds until the last task ends. ``early`` is True if a
    recomputation does not wait for its gradient."""

    parts: tuple[Part, ...]
    results: tuple[PartSchedule, ...]
    makespan: float
    early: bool = True

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        ranks: dict[int, tuple[Task, ...]] = {}
        for part, result in zip(self.parts, self.results, strict=True):
            ids, quotas = [s.id for s in part.stages], [s.quota or 1.0 for s in part.stages]
            tasks = [
                Task(ids[s], part.microbatches[m], OPS[op], group, quotas[s] if group >= 0 else 1.0)
                for s, m, op, group in result.log.tolist()
            ]
            for index, rank in enumerate(part.ranks):
                ranks[rank] = tuple(tasks[result.starts[index] : result.starts[index + 1]])
        return tuple(ranks[rank] for rank in range(len(ranks)))
