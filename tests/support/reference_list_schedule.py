"""List scheduling of a step: every rank, when free, takes the best task that it can start.

:class:`~raymm.scheduler.schedules.policy.Rules` define the parts of a backward and the memory
limits, and a :class:`~raymm.scheduler.schedules.policy.Policy` ranks the tasks. Times are those
that the simulator finds for the result.

On a rank with quotas the best task may start together with others: of every other module with a
quota, the best task that could also start and is of the same kind (quotas are chosen so that
modules take about the same time, separately for forwards and backwards). A task alone has the whole
device, except for backwards whose forward ran on a quota: autograd runs those on the same one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raymm.errors import NoPlanError
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedule.step_graph import ActiveStages
from raymm.scheduler.schedules.base import Task
from raymm.scheduler.schedules.policy import Rules
from tests.support.reference_stage_progress import UNKNOWN_SIZES, StageProgress

# Number of microbatches for which a stage without a backward is planned ahead of its consumer. It
# keeps no activations, only outputs that wait to be received; two hide the jitter between ranks.
# This orders the work of a rank; it does not block an idle rank.
RUN_AHEAD = 2

FORWARD, RECOMPUTE, BACKWARD, WEIGHT = range(4)


class ReferenceSchedule(NamedTuple):
    """Tasks per rank, in order, and the end of the last one (seconds)."""

    tasks: tuple[tuple[Task, ...], ...]
    makespan: float


class _Begun(NamedTuple):
    """Task in flight, with its duration on a whole device."""

    state: StageProgress
    kind: int
    microbatch: int
    seconds: float


class ListScheduler:
    """Scheduler of one step.

    Args:
        active: modules used by each microbatch.
        costs: known seconds per (stage, compute op).
        sizes: bytes per stage; missing stages count as equal.
        delays: seconds per message, per directed edge (gradients use the reversed data edge); 0 if
            missing.
    """

    def __init__(
        self,
        plan: Plan,
        active: Sequence[ActiveStages],
        costs: Mapping[tuple[StageId, Op], float],
        sizes: Mapping[StageId, StageCost] | None = None,
        delays: Mapping[Edge, float] | None = None,
    ) -> None:
        self.plan = plan
        self.active = active
        self.costs = costs
        self.sizes = sizes or {}
        self.delays = delays or {}

    def run(self, rules: Rules) -> ReferenceSchedule:
        """Schedule all tasks.

        Raises:
            NoPlanError: a rank filled up to its byte limit and can never continue.
        """
        self._rules = rules
        self._start()
        num_ranks = self.plan.num_ranks
        free_at = [0.0] * num_ranks
        events = [(0.0, rank) for rank in range(num_ranks)]
        makespan = 0.0
        while events:
            now, rank = heapq.heappop(events)
            while events and events[0] == (now, rank):
                heapq.heappop(events)
            if free_at[rank] > now:
                continue
            choice = self._choose(rank, now)
            if choice is None:
                continue  # woken again when a possible input becomes ready
            end = self._begin(rank, *choice, now)
            free_at[rank] = end
            makespan = max(makespan, end)
            heapq.heappush(events, (end, rank))
            for wake in self._wakes:
                heapq.heappush(events, wake)
        self._check_finished()
        return ReferenceSchedule(tuple(map(tuple, self._order)), makespan)

    def _start(self) -> None:
        plan, rules = self.plan, self._rules
        stages: dict[StageId, StageProgress] = {}
        for stage in plan.stages:
            size = self.sizes.get(stage.id, UNKNOWN_SIZES)
            state = StageProgress(plan, stage, self.active, self.costs, size)
            # by microbatch, then nearest to the loss first
            state.order = (state.depth, len(stages))
            state.held = len(self.active) if rules.flush else plan.warm_up[stage.id]
            stages[stage.id] = state
        for state in stages.values():
            state.connect(plan, stages, self.delays)
        self._stages = stages
        self._on_rank = [
            [stages[s.id] for s in plan.rank_stages(rank)] for rank in range(plan.num_ranks)
        ]
        # Per rank, bytes by microbatch and group, in the order of completion.
        self._held: list[dict[tuple[int, int, int], float]] = [{} for _ in range(plan.num_ranks)]
        self._order: list[list[Task]] = [[] for _ in range(plan.num_ranks)]
        self._num_groups = 0

    @property
    def seconds(self) -> dict[tuple[StageId, Op], float]:
        """Return the assumed seconds of every op of the last run."""
        return {
            key: seconds for state in self._stages.values()
            for key, seconds in state.op_seconds().items()
        }

    def _check_finished(self) -> None:
        for state in self._stages.values():
            left = state.num_left
            if left and self._rules.byte_limits is not None:
                raise NoPlanError(
                    f"activation limits {self._rules.byte_limits} leave {left} task(s) of stage "
                    f"{state.id} without room; a rank needs room for one microbatch"
                )
            if left:  # cannot happen: every limit is at least one and the graph is acyclic
                raise AssertionError(f"{left} task(s) of stage {state.id} are unscheduled")

    # -- selection --------------------------------------------------------------------

    def _choose(
        self, rank: int, now: float, others: Sequence[_Begun] = ()
    ) -> tuple[StageProgress, int] | None:
        """Return the best task that a rank can start, concurrently with ``others`` if there are
        any.
        """
        policy = self._rules.policy
        candidates: list[tuple[StageProgress, int, float, int]] = []
        lacks_room = max(policy.priority)  # best priority of tasks that only lack memory
        for state in self._on_rank[rank]:
            for kind, ready, microbatch, has_room in self._candidates(state):
                if others and not self._fits_group(state, kind, microbatch, others):
                    continue
                if has_room:
                    candidates.append((state, kind, ready, microbatch))
                elif ready <= now:
                    lacks_room = min(lacks_room, policy.priority[kind])
        best: tuple[int, int, int] | None = None
        chosen: tuple[StageProgress, int] | None = None
        soon: list[tuple[float, int]] = []  # (time, priority) of tasks that are not ready yet
        for state, kind, ready, microbatch in candidates:
            priority = policy.priority[kind]
            if kind == WEIGHT:
                priority = min(priority, lacks_room)
            if ready > now:
                soon.append((ready, priority))
                continue
            depth = state.depth if kind == FORWARD else -state.depth
            key = (priority, microbatch, depth)
            if best is None or key < best:
                best, chosen = key, (state, kind)
        if best is None or chosen is None:
            return None
        if policy.patience and chosen[1] in (RECOMPUTE, WEIGHT):
            state, kind = chosen
            duration = state.weight_s if kind == WEIGHT else state.recompute_s
            horizon = now + policy.patience * duration
            if any(ready < horizon and priority < best[0] for ready, priority in soon):
                return None
        return chosen

    def _on_its_quota(self, state: StageProgress, kind: int, microbatch: int) -> bool | None:
        """Return True if a task must run on its module's quota; None if it may use the whole
        device.

        A backward runs where its inputs were computed.
        """
        if state.quota is None:
            return False
        made_first = state.recompute and not self._rules.early_recompute
        if kind in (FORWARD, RECOMPUTE) or (kind == BACKWARD and made_first):
            return None
        return microbatch in state.on_quota

    def _fits_group(
        self, state: StageProgress, kind: int, microbatch: int, others: Sequence[_Begun]
    ) -> bool:
        return (
            kind == others[0].kind
            and all(state.module != other.state.module for other in others)
            and self._on_its_quota(state, kind, microbatch) is not False
        )

    def _candidates(self, state: StageProgress) -> list[tuple[int, float, int, bool]]:
        """Return (kind, ready time, microbatch, True if memory suffices) of each possible next
        task.
        """
        policy = self._rules.policy
        candidates = []
        if state.next_forward < len(state.forwards):
            microbatch = state.forwards[state.next_forward]
            ready = state.forward_ready(microbatch)
            if ready < math.inf and self._may_run_ahead(state, microbatch):
                room = microbatch not in state.needs or self._room(state, FORWARD, microbatch)
                candidates.append((FORWARD, ready, microbatch, room))
        early = self._rules.early_recompute and state.recompute
        if early and state.next_recompute < len(state.backwards):
            microbatch = state.backwards[state.next_recompute]
            ready = state.forward_end.get(microbatch, math.inf)
            if ready < math.inf and state.gradient_is_near(microbatch, policy.hops):
                room = self._room(state, RECOMPUTE, microbatch)
                candidates.append((RECOMPUTE, ready, microbatch, room))
        held_back = self._rules.flush and state.next_forward < len(state.forwards)
        if state.next_backward < len(state.backwards) and not held_back:
            microbatch = state.backwards[state.next_backward]
            ready = state.backward_ready(microbatch, early)
            if ready < math.inf:
                candidates.append((BACKWARD, ready, microbatch, True))
        if state.weights:
            microbatch = state.weights[0]
            ready = state.backward_end.get(microbatch, math.inf)  # not yet, if it began just now
            candidates.append((WEIGHT, ready, microbatch, True))
        return candidates

    def _may_run_ahead(self, state: StageProgress, microbatch: int) -> bool:
        if microbatch not in state.needs:
            if self._on_rank[state.rank] == [state]:  # no other stage waits for the rank
                return True
            return state.next_forward - min(state.consumed.values(), default=math.inf) < RUN_AHEAD
        ahead = state.started - state.next_backward
        if own := self._rules.policy.ahead:
            modules = [node.name for node in self.plan.graph.nodes]
            return ahead < own[modules.index(state.module)][state.index]
        return ahead < state.held or (
            self._rules.policy.beyond_depth and self._rules.byte_limits is not None
        )

    def _room(self, state: StageProgress, kind: int, microbatch: int) -> bool:
        """Return True if a forward or recomputation leaves memory for the tasks that must come
        first.

        A rank can always finish its microbatches oldest first (of one microbatch, stages nearer to
        the loss first) if each still fits once all earlier ones are finished. A task may start if
        that stays true; otherwise a rank could fill up with early tasks and never continue.
        """
        if self._rules.byte_limits is None:
            return True
        # Sums of many sizes: an exactly met limit must not fail by rounding.
        limit = self._rules.byte_limits[state.rank] * (1 + 1e-12)
        held = self._held[state.rank]
        more = state.kept if kind == FORWARD else state.activation
        if sum(held.values()) + more > limit:
            return False
        task = (microbatch, *state.order)
        for other in self._on_rank[state.rank]:
            # The next microbatch for which the stage needs memory.
            index = other.next_recompute if other.recompute else other.started
            if index == len(other.backwards):
                continue
            first = other.backwards[index]
            place = (first, *other.order)
            if place > task or (place == task and kind == RECOMPUTE):
                continue
            after = sum(size for key, size in held.items() if key >= place)
            for late in self._on_rank[state.rank]:  # forwards that must still precede it
                key = (first, *late.order)
                if key >= place and key != task and first in late.needs:
                    if first not in late.forward_end:
                        after += late.kept
            if after + more + other.activation > limit:
                return False
        return True

    # -- execution --------------------------------------------------------------------

    def _begin(self, rank: int, state: StageProgress, kind: int, now: float) -> float:
        """Begin a task, and its concurrent ones; return the time when all of them end."""
        self._wakes: list[tuple[float, int]] = []
        order = self._order[rank]
        first = len(order)
        begun = [self._begin_task(rank, state, kind, now)]
        if state.quota is None:  # most stages have none
            end = now + begun[0].seconds
            self._end(begun[0], end)
            return end
        on_quota = self._on_its_quota(state, kind, begun[0].microbatch)
        if on_quota is not False:
            while (other := self._choose(rank, now, begun)) is not None:
                begun.append(self._begin_task(rank, *other, now))
            on_quota = on_quota or len(begun) > 1
        if on_quota:
            end = now + max(task.seconds / (task.state.quota or 1.0) for task in begun)
            for index in range(first, len(order)):
                quota = self._stages[order[index].stage].quota
                order[index] = order[index]._replace(group=self._num_groups, quota=quota)
            self._num_groups += 1
        else:
            end = now + begun[0].seconds
        for task in begun:
            if task.kind in (FORWARD, RECOMPUTE):
                quotas = task.state.on_quota
                (quotas.add if on_quota else quotas.discard)(task.microbatch)
            self._end(task, end)
        return end

    def _begin_task(self, rank: int, state: StageProgress, kind: int, now: float) -> _Begun:
        if kind == FORWARD:
            return self._begin_forward(rank, state, now)
        if kind == RECOMPUTE:
            microbatch, seconds = state.backwards[state.next_recompute], state.recompute_s
            state.next_recompute += 1
            self._held[rank][microbatch, *state.order] += state.activation
            self._order[rank].append(Task(state.id, microbatch, Op.RECOMPUTE))
        elif kind == BACKWARD:
            return self._begin_backward(rank, state)
        else:
            microbatch, seconds = state.weights.popleft(), state.weight_s
            del self._held[rank][microbatch, *state.order]
            self._order[rank].append(Task(state.id, microbatch, Op.BACKWARD_WEIGHT))
        return _Begun(state, kind, microbatch, seconds)

    def _begin_forward(self, rank: int, state: StageProgress, now: float) -> _Begun:
        microbatch = state.forwards[state.next_forward]
        state.next_forward += 1
        if microbatch in state.needs:
            op = Op.FORWARD_CHECKPOINTED if state.recompute else Op.FORWARD
            seconds = state.forward_s
            state.started += 1
            self._held[rank][microbatch, *state.order] = state.kept
        else:
            op, seconds = Op.FORWARD_NO_GRAD, state.no_grad_s
        run = self.active[microbatch].stages
        for producer in state.producers:
            if producer.id in run:
                producer.consumed[state.module] += 1
                self._wakes.append((now, producer.rank))
        self._order[rank].append(Task(state.id, microbatch, op))
        return _Begun(state, FORWARD, microbatch, seconds)

    def _begin_backward(self, rank: int, state: StageProgress) -> _Begun:
        microbatch = state.backwards[state.next_backward]
        order = self._order[rank]
        seconds = 0.0
        if state.recompute and not self._rules.early_recompute:
            order.append(Task(state.id, microbatch, Op.RECOMPUTE))
            seconds = state.recompute_s
            state.next_recompute += 1
        split = self._rules.split and state.trains and microbatch in state.owes
        seconds += state.input_s if split else state.backward_s
        state.next_backward += 1
        order.append(
            Task(state.id, microbatch, Op.BACKWARD_INPUT if split else Op.BACKWARD)
        )
        if split:
            state.weights.append(microbatch)
        else:
            del self._held[rank][microbatch, *state.order]
        return _Begun(state, BACKWARD, microbatch, seconds)

    def _end(self, begun: _Begun, end: float) -> None:
        """Set the end of a task, and wake the ranks that may wait for it."""
        state, kind, microbatch, _ = begun
        if kind == FORWARD:
            state.forward_end[microbatch] = end
            for consumer in state.consumers:
                delay = self.delays.get((state.id, consumer.id), 0.0)
                self._wakes.append((end + delay, consumer.rank))
        elif kind == RECOMPUTE:
            state.recomputed_end[microbatch] = end
        elif kind == BACKWARD:
            state.backward_end[microbatch] = end
            for producer in state.producers:
                delay = self.delays.get((state.id, producer.id), 0.0)
                self._wakes.append((end + delay, producer.rank))
