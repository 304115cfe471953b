"""Rules of list scheduling, and policies for the choice of a next task, which are searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raymm.errors import PlanError

# Larger than any distance of a gradient.
ANY_DISTANCE = 1_000_000


@dataclass(frozen=True)
class Policy:
    """Preferences of list scheduling. The best values depend on the graph and its costs.

    Attributes:
        priority: rank of each kind of task (forward, recompute, backward, weight); low goes first.
            Within a kind, the oldest microbatch goes first. Ties go to the stage nearest to the
            loss for forwards, and to the farthest stage for other tasks.
        patience: a weight gradient or recomputation does not start if a task of a better kind is
            known to become ready within this fraction of its duration.
        hops: largest distance of the gradient at which a recomputation may start: the gradient must
            have left the stage that many edges downstream. It keeps a rank with several stages from
            filling its memory for a gradient that arrives late.
        beyond_depth: True if forwards may run further ahead than the stage's depth, as far as
            memory allows.
        ahead: most microbatches held by each stage, by module in the graph's order; empty to use
            the depth of each stage.
    """

    priority: tuple[int, int, int, int]
    patience: float = 0.0
    hops: int = ANY_DISTANCE
    beyond_depth: bool = False
    ahead: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        if len(self.priority) != 4 or any(type(rank) is not int for rank in self.priority):
            raise ValueError(
                f"priority is {self.priority!r}; it needs a whole number for each of forward, "
                "recompute, backward and weight"
            )
        if not 0 <= self.patience <= 1:
            raise ValueError(f"patience is {self.patience!r}; it must be between 0 and 1")
        if type(self.hops) is not int or self.hops < 1:
            raise ValueError(f"hops is {self.hops!r}; it must be a whole number, at least 1")
        if type(self.beyond_depth) is not bool:
            raise ValueError(f"beyond_depth is {self.beyond_depth!r}; it must be true or false")
        if any(type(held) is not int or held < 1 for module in self.ahead for held in module):
            raise ValueError(
                f"ahead is {self.ahead!r}; it must be whole numbers, at least 1, by module and "
                "stage"
            )


def check_policy(policy: Policy | None, stages: Mapping[str, int]) -> None:
    """Raise ``PlanError`` if ``policy.ahead`` does not match ``stages``, the number of stages of
    one replica by module in the graph's order."""
    if policy is None or not policy.ahead:
        return
    # Older files have numbers for all replicas; only those of the first replica are used.
    counts = [len(module) for module in policy.ahead]
    if len(counts) != len(stages) or any(
        not count or count % depth for count, depth in zip(counts, stages.values(), strict=True)
    ):
        stages_text = ", ".join(f"{count} of {module}" for module, count in stages.items())
        raise PlanError(f"policy.ahead is {policy.ahead}; it must have numbers for {stages_text}")


# 1F1B: run a forward while the stage may run ahead, because other ranks wait for it; otherwise a
# backward, which lets the stage run ahead again.
ONE_F_ONE_B = Policy((0, 1, 1, 2))


@dataclass(frozen=True, eq=False)
class TaskOrder:
    """Preferences by microbatch, in place of the priorities of a policy.

    Attributes:
        keys: (3, M) by ``StageId``, keys of the forward, of the backward (and its recomputation)
            and of B_w on every microbatch. A free rank takes the ready task with the lowest key,
            then the oldest microbatch. A task whose key is at least :data:`FILLS_BUBBLES` does not
            begin if a task below becomes ready before it would end.
        ahead: most microbatches that a stage holds, by ``StageId``.
        phases: (2, M) whole numbers from 0 by ``StageId``, phases of the forward and the backward.
            A task waits until all tasks of its rank in earlier phases have begun. Empty for no
            phases.
        seconds: forward and backward seconds by ``StageId`` that the order is made for, in place of
            those of the step; empty for the latter.
    """

    keys: Mapping[Any, Any]
    ahead: Mapping[Any, int]
    phases: Mapping[Any, Any] = field(default_factory=dict)
    seconds: Mapping[Any, tuple[float, float]] = field(default_factory=dict)


# Least key of a task that only fills bubbles.
FILLS_BUBBLES = 1e12


@dataclass(frozen=True)
class Rules:
    """Kind of schedule to create.

    Attributes:
        flush: True if a stage runs all forwards before its first backward (GPipe); otherwise it
            runs ahead by at most its depth (1F1B's warm-up).
        split: True if B_w is a separate task where another stage waits for B_d. It becomes as
            urgent as the tasks that wait for its memory.
        early_recompute: True if a recomputation may start before its gradient arrives.
        byte_limits: bytes of activations per rank.
        order: preferences by microbatch; None to use those of the policy.
    """

    policy: Policy = ONE_F_ONE_B
    flush: bool = False
    split: bool = False
    early_recompute: bool = False
    byte_limits: tuple[float, ...] | None = None
    order: TaskOrder | None = None


# Policies worth trying, found on the 27 models of Cornstarch v1 with every combination of frozen
# modules. From many more candidates, these came within a percent of the best on every model.
_ONE_STAGE_PER_RANK = (
    Policy((0, 1, 1, 3)), Policy((0, 1, 1, 3), 0.5), Policy((0, 1, 1, 3), 1.0),
    Policy((0, 1, 1, 3), 0.5, beyond_depth=True), Policy((1, 1, 0, 3), beyond_depth=True),
    Policy((1, 2, 0, 3)), Policy((0, 0, 0, 1)), Policy((0, 0, 0, 1), 1.0, beyond_depth=True),
    Policy((0, 1, 1, 1), beyond_depth=True),
)
# A recomputation ahead of its gradient takes memory from forwards; which of them matters more
# depends on the distance of the gradient. Chosen from 260 policies that were tried on random graphs
# (benchmarks/shared/tight_plans.py).
_RECOMPUTING = (
    Policy((0, 2, 1, 3), 0.5, 8), Policy((1, 2, 0, 3), beyond_depth=True),
    Policy((0, 2, 1, 3), 0.5, 2), Policy((0, 0, 1, 3), 0.5, 4), Policy((1, 1, 0, 3), 0.5, 1, True),
    Policy((0, 1, 0, 3), 0.5, 1), Policy((0, 2, 1, 3), 0.0, 8), Policy((0, 1, 1, 3), 0.5, 8, True),
    Policy((1, 1, 0, 3), 0.5, 2, True), Policy((0, 1, 2, 3), 0.0, 2),
)
_SEVERAL_STAGES_PER_RANK = (
    Policy((1, 2, 0, 3), 0.5, 4), Policy((1, 1, 0, 3), 0.5, 4), Policy((1, 2, 0, 3), 0.0, 2),
    Policy((0, 0, 0, 1), 1.0, 4), Policy((1, 2, 0, 3), 0.0, 4), Policy((1, 1, 0, 3), 0.0, 3),
    Policy((1, 0, 0, 3), 0.0, 2, True), Policy((0, 1, 1, 3), 0.0, 4),
    Policy((0, 0, 0, 1), 1.0, 4, True), Policy((1, 1, 0, 3), 0.0, 2),
    Policy((1, 2, 0, 3), 0.0, 4, True), Policy((1, 0, 0, 3), 0.5, 2),
    Policy((1, 0, 0, 3), 0.0, 4, True), Policy((0, 0, 0, 1), 0.25, 4, True),
    Policy((0, 1, 1, 3), 0.0, 2), Policy((0, 1, 1, 3)), Policy((1, 0, 0, 3), 0.25, 4),
    Policy((1, 1, 0, 3), 0.0, 4), Policy((1, 0, 0, 3), 0.0, 3), Policy((0, 1, 2, 3), 1.0, 4),
)


def policies(several_stages_per_rank: bool, recompute: bool = False) -> tuple[Policy, ...]:
    """Return policies worth trying for the zero-bubble schedule."""
    if several_stages_per_rank:
        return _SEVERAL_STAGES_PER_RANK
    return _ONE_STAGE_PER_RANK + _RECOMPUTING if recompute else _ONE_STAGE_PER_RANK
