"""Interface of schedules, and the view of a step that they order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from raymm.scheduler.schedules.policy import Policy


class Task(NamedTuple):
    """One operation (:class:`raymm.scheduler.program.program.Op`) of a stage, named by its
    ``StageId``, on a microbatch. ``group`` is -1 outside concurrent groups."""

    stage: Any
    microbatch: int
    op: Any
    group: int = -1
    quota: float = 1.0


class Step(Protocol):
    """Step that a schedule orders, after the planner has placed its stages.

    Attributes:
        plan: the :class:`raymm.Plan`, for graph, stages, depths (``plan.warm_up``) and costs.
        num_microbatches: microbatches of the step, which may be fewer than the plan's.
        forward_only: True for evaluation: no stage has a backward.
    """

    plan: Any
    forward_only: bool

    @property
    def num_microbatches(self) -> int: ...

    def stages(self, rank: int) -> Sequence[Any]:
        """Return the stages of a rank, from the inputs to the loss."""
        ...

    def forwards(self, stage: Any, microbatch: int) -> tuple[Task, ...]:
        """Return the forward of a stage on a microbatch; empty if the stage does not run it,
        because the microbatch lacks the module's input or belongs to another replica."""
        ...

    def backwards(self, stage: Any, microbatch: int) -> tuple[Task, ...]:
        """Return the backward of a stage on a microbatch, after the recomputation if the stage
        recomputes; empty if nothing in the stage or before it is trained."""
        ...


class Schedule(ABC):
    """Order of the tasks of each rank. A subclass defines :meth:`order`.

    Attributes:
        name: name in plans and configurations; by default ``module:Class``.
        splits_backward: True if B_w is a separate task, which needs the weights and activations
            after B_d. Such a plan cannot have FSDP or recompute single layers.
        uses_slots: True if stages have slots.
        searches_policy: True if :meth:`tuned` searches for the policy of a plan without one.
        holds_warm_up: True if a stage holds at most ``plan.warm_up`` microbatches and backwards are
            not split, for which lower bounds are higher.
        proven: True if every order is known to run to its end. Other orders are proven whenever a
            step is lowered.
    """

    name: str = ""
    splits_backward: bool = False
    uses_slots: bool = False
    searches_policy: bool = False
    holds_warm_up: bool = False
    proven: bool = False

    @abstractmethod
    def order(self, step: Step, rank: int) -> Sequence[Task]:
        """Return the tasks of a rank in the order in which it runs them: every task of
        ``step.forwards`` and ``step.backwards`` for the rank's stages, once. Messages are added
        before and after the tasks that need them."""

    def listed(self, step: Any) -> Any:
        """Return the order of all ranks as arrays, which are timed without a program; None if the
        schedule has only :meth:`order`."""
        return None

    def tuned(self, step: Any) -> tuple[Policy | None, float]:
        """Return the policy that a search finds for the plan of a full step, and the seconds of the
        step under it. None if the plan needs no policy."""
        return None, step.seconds()


class ListedSchedule(Schedule):
    """Schedule that list scheduling of all ranks makes
    (:mod:`raymm.scheduler.schedule.list_schedule`). A subclass defines :meth:`listed`, which calls
    ``step.run`` with rules."""

    proven = True

    @abstractmethod
    def listed(self, step: Any) -> Any: ...

    def order(self, step: Any, rank: int) -> Sequence[Task]:
        return step.listed.tasks[rank]
