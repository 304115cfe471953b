"""Progress of a stage in a list schedule, and ready times of its next tasks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence

from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import Edge, StageId
from raymm.scheduler.program.program import Op
from raymm.scheduler.schedule.stage_costs import StageCost
from raymm.scheduler.schedule.step_graph import ActiveStages

# A stage with unknown costs: a backward takes twice as long as a forward, and a forward keeps much
# more than its input.
UNKNOWN_FORWARD, UNKNOWN_BACKWARD = 1.0, 2.0
UNKNOWN_SIZES = StageCost(0.0, 0.0, 0.0, input_bytes=1, activation_bytes=16)

# A task takes some time, or a rank could begin tasks forever at one instant.
SHORTEST = 1e-9


class StageProgress:
    """Progress of one stage.

    It processes its microbatches in ascending order, forward, recompute, backward and weight, so
    that messages of an edge keep their order.

    Args:
        plan: plan of the stage.
        active: modules used by each microbatch.
        costs: known seconds per (stage, compute op).
        cost: the stage's bytes.
    """

    __slots__ = (
        "active", "id", "rank", "depth", "order", "held", "producers", "consumers", "recompute",
        "forward_s", "no_grad_s", "recompute_s", "backward_s", "input_s", "weight_s",
        "kept", "activation", "forwards", "backwards", "needs", "owes", "trains",
        "started", "next_forward", "next_recompute", "next_backward", "weights",
        "forward_end", "backward_end", "recomputed_end", "consumed", "edge_delay",
        "grad_delay", "module", "index", "quota", "on_quota",
    )

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        active: Sequence[ActiveStages],
        costs: Mapping[tuple[StageId, Op], float],
        cost: StageCost,
    ) -> None:
        self.active, self.id = active, stage.id
        self.rank, self.module, self.quota = stage.rank, stage.module, stage.quota
        self.index = stage.index
        self.depth = plan.depth[stage.id]
        self.recompute = stage.recompute
        self.kept = cost.input_bytes if stage.recompute else cost.activation_bytes
        self.activation = cost.activation_bytes if stage.recompute else 0
        self.trains = plan.trainable(stage)
        self.forwards = [m for m, a in enumerate(active) if stage.id in a.stages]
        self.backwards = [m for m, a in enumerate(active) if stage.id in a.needs_backward]
        self.needs = frozenset(self.backwards)
        self.owes = frozenset(m for m, a in enumerate(active) if stage.id in a.needs_input_grad)
        self._set_seconds(costs)
        self.started = 0
        self.next_forward = self.next_recompute = self.next_backward = 0
        self.weights: deque[int] = deque()  # microbatches with B_d done and B_w pending
        self.forward_end: dict[int, float] = {}
        self.recomputed_end: dict[int, float] = {}
        self.backward_end: dict[int, float] = {}
        self.consumed: dict[str, int] = {}
        self.on_quota: set[int] = set()  # microbatches whose activations were computed on the quota

    def _set_seconds(self, costs: Mapping[tuple[StageId, Op], float]) -> None:
        """Set measured durations.

        A forward that was measured only under ``no_grad`` (or only with gradients) takes about as
        long the other way.
        """

        def seconds(*ops: Op, default: float) -> float:
            measured = (costs[self.id, op] for op in ops if (self.id, op) in costs)
            return max(next(measured, default), SHORTEST)

        f, n, c = Op.FORWARD, Op.FORWARD_NO_GRAD, Op.FORWARD_CHECKPOINTED
        self.forward_s = seconds(f, c, n, default=UNKNOWN_FORWARD)
        self.no_grad_s = seconds(n, c, f, default=UNKNOWN_FORWARD)
        self.recompute_s = seconds(Op.RECOMPUTE, f, c, n, default=UNKNOWN_FORWARD)
        parts = [(self.id, op) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
        measured = all(part in costs for part in parts)
        whole = sum(costs[part] for part in parts) if measured else UNKNOWN_BACKWARD
        self.backward_s = seconds(Op.BACKWARD, default=whole)
        self.input_s = seconds(Op.BACKWARD_INPUT, default=self.backward_s / 2)
        self.weight_s = seconds(Op.BACKWARD_WEIGHT, default=self.backward_s - self.input_s)

    def connect(
        self, plan: Plan, stages: Mapping[StageId, StageProgress], delays: Mapping[Edge, float]
    ) -> None:
        """Connect this stage with its producers and consumers.

        Args:
            stages: all stages of the plan.
            delays: seconds per message, per directed edge; 0 if missing.
        """
        self.producers = [stages[name] for name in plan.stage_producers[self.id]]
        consumers = [stages[name] for name in plan.stage_consumers[self.id]]
        ranks = [consumer.rank for consumer in consumers]
        self.consumers = sorted(consumers, key=lambda consumer: ranks.index(consumer.rank))
        self.edge_delay = [delays.get((p.id, self.id), 0.0) for p in self.producers]
        self.grad_delay = [delays.get((c.id, self.id), 0.0) for c in self.consumers]
        self.consumed = {c.module: 0 for c in self.consumers}

    def op_seconds(self) -> dict[tuple[StageId, Op], float]:
        """Return the assumed duration of every op."""
        return {
            (self.id, op): seconds
            for op, seconds in (
                (Op.FORWARD, self.forward_s),
                (Op.FORWARD_CHECKPOINTED, self.forward_s),
                (Op.FORWARD_NO_GRAD, self.no_grad_s),
                (Op.RECOMPUTE, self.recompute_s),
                (Op.BACKWARD, self.backward_s),
                (Op.BACKWARD_INPUT, self.input_s),
                (Op.BACKWARD_WEIGHT, self.weight_s),
            )
        }

    @property
    def num_left(self) -> int:
        """Return the number of forwards and backwards that have not begun."""
        return len(self.forwards) - self.next_forward + len(self.backwards) - self.next_backward

    def forward_ready(self, microbatch: int) -> float:
        """Return the arrival time of a forward's last input; ``inf`` while unknown."""
        run = self.active[microbatch].stages
        ready = 0.0
        for producer, delay in zip(self.producers, self.edge_delay, strict=True):
            if producer.id in run:
                ready = max(ready, producer.forward_end.get(microbatch, math.inf) + delay)
        return ready

    def backward_ready(self, microbatch: int, early: bool) -> float:
        """Return the time when a backward's gradients and its own forward are available.

        With ``early``, its recomputation instead of the forward; ``inf`` while unknown.
        """
        done = self.recomputed_end if early else self.forward_end
        ready = done.get(microbatch, math.inf)
        needs = self.active[microbatch].needs_backward
        for consumer, delay in zip(self.consumers, self.grad_delay, strict=True):
            if consumer.id in needs:
                ready = max(ready, consumer.backward_end.get(microbatch, math.inf) + delay)
        return ready

    def gradient_is_near(self, microbatch: int, hops: int) -> bool:
        """Return True if the gradient is at most so many stages away."""
        state = self
        for _ in range(hops):
            if not state.consumers:
                return True
            needs = self.active[microbatch].needs_backward
            state = next((c for c in state.consumers if c.id in needs), state)
            if microbatch in state.backward_end:
                return True
        return not state.consumers and microbatch in state.forward_end
