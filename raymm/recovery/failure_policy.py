"""Failure policy: decides, as data, how a run continues after an interruption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

HOUR_S = 3600.0
# Seconds to wait before each retry of a step that found no resource or no connection.
RETRY_WAITS_S = (1.0, 5.0, 25.0)


class Cause(Enum):
    """Why an attempt ended before the run did. The values are metric tags."""

    FAILURE = "failure"
    """A process, or the node it was on, was lost."""
    PREEMPTION = "preemption"
    """A node was lost or left after Ray was notified that it would end."""
    RESIZE = "resize"
    """The cluster has room for other degrees."""
    ERROR = "error"
    """Code on a rank raised."""
    RESOURCES = "resources"
    """A process found no memory, thread, file descriptor or disk space."""
    CONNECTION = "connection"
    """A process could not reach a server, or lost a connection to one."""
    CLUSTER = "cluster"
    """The cluster is gone, so no processes can be started."""


# Causes that may disappear without intervention.
_PASSING = (Cause.RESOURCES, Cause.CONNECTION)


class Action(Enum):
    """Continuation of a run after an interruption."""

    RECOVER = "recover"
    """Continue in the remaining processes from the last snapshot."""
    GO_ON = "go on"
    """Start new processes from the last checkpoint."""
    END = "end"
    """End the run. The same command resumes it."""
    END_FOR_GOOD = "end for good"
    """End the run. The same command would fail in the same way."""


@dataclass(frozen=True)
class Interruption:
    """End of an attempt, or of a step, before the run finished.

    Attributes:
        step: step in flight; None before the first step of the attempt.
        text: description without parts that differ between repetitions, such as process ids.
        at: monotonic time in seconds.
        in_place: True if enough processes survived to recover in place.
        recovering: True if it happened during a recovery, so that no step can be the cause.
    """

    cause: Cause
    step: int | None
    text: str
    at: float = 0.0
    in_place: bool = False
    recovering: bool = False

    @property
    def what(self) -> tuple[Cause, int | None, bool, str]:
        """Key that is equal for repetitions of the same interruption."""
        return self.cause, self.step, self.recovering, self.text

    @property
    def where(self) -> str:
        """Phrase about the step or recovery that was interrupted."""
        if self.step is None:
            return "before the first step"
        return f"in {'the recovery of ' if self.recovering else ''}step {self.step}"


@dataclass(frozen=True)
class Decision:
    """Action and its reason. The reason continues a sentence."""

    action: Action
    why: str
    wait_s: float = 0.0


@dataclass(frozen=True)
class FailurePolicy:
    """Policy that decides from the history of interruptions alone.

    Attributes:
        max_failures: maximum number of restarts after failures; None for no limit.
        max_preemptions: maximum number of restarts after preemptions; None for no limit.
        max_recoveries: maximum number of in-place recoveries per hour; None for no limit.
    """

    max_failures: int | None
    max_preemptions: int | None
    max_recoveries: int | None = None

    def decide(self, interruptions: Sequence[Interruption]) -> Decision:
        """Return the action after the last of a run's interruptions.

        Args:
            interruptions: all interruptions of the run so far, oldest first.
        """
        *earlier, last = interruptions
        if last.cause is Cause.ERROR:
            return Decision(Action.END_FOR_GOOD, "the run's code would raise the same error again")
        if last.cause is Cause.CLUSTER:
            return Decision(Action.END, "the cluster is gone")
        if last.cause is Cause.RESIZE:
            return Decision(Action.GO_ON, "the cluster has changed")
        if last.cause in _PASSING:
            return self._retry(interruptions)
        preempted = last.cause is Cause.PREEMPTION
        if not preempted and last.what in [event.what for event in earlier]:
            return Decision(
                Action.END_FOR_GOOD,
                f"the same failure happened {last.where} before and would recur",
            )
        return self._within_budget(interruptions)

    def _retry(self, interruptions: Sequence[Interruption]) -> Decision:
        """Retry after waits that grow with each interruption in the same step, then end the run."""
        last = interruptions[-1]
        times = sum(event.cause in _PASSING and event.step == last.step for event in interruptions)
        if times > len(RETRY_WAITS_S):
            waits = ", ".join(f"{seconds:g}" for seconds in RETRY_WAITS_S)
            return Decision(
                Action.END, f"retries after {waits} s did not help {last.where}; free the "
                "resource or repair the connection first",
            )
        wait = RETRY_WAITS_S[times - 1]
        decision = self._within_budget(interruptions)
        if decision.action is Action.END:
            return decision
        return replace(decision, why=f"{decision.why}, after a wait of {wait:g} s", wait_s=wait)

    def _within_budget(self, interruptions: Sequence[Interruption]) -> Decision:
        last = interruptions[-1]
        if last.in_place:
            return self._recovery(interruptions)
        preempted = last.cause is Cause.PREEMPTION
        field, most = (
            ("run.max_preemptions", self.max_preemptions) if preempted
            else ("run.max_failures", self.max_failures)
        )
        counted = (last.cause,) if preempted else (Cause.FAILURE, *_PASSING)
        count = sum(event.cause in counted and not event.in_place for event in interruptions)
        name = last.cause.value if preempted else Cause.FAILURE.value
        return _within(Action.GO_ON, name, count, most, field)

    def recoveries_left(self, interruptions: Sequence[Interruption], at: float) -> float:
        """Return how many in-place recoveries the budget still allows at a time (seconds)."""
        if self.max_recoveries is None:
            return math.inf
        return self.max_recoveries - _recoveries(interruptions, at)

    def _recovery(self, interruptions: Sequence[Interruption]) -> Decision:
        count = _recoveries(interruptions, interruptions[-1].at)
        return _within(
            Action.RECOVER, "recovery", count, self.max_recoveries, "run.max_recoveries, per hour"
        )


def _recoveries(interruptions: Sequence[Interruption], at: float) -> int:
    return sum(event.in_place and event.at > at - HOUR_S for event in interruptions)


def _within(action: Action, what: str, count: int, most: int | None, field: str) -> Decision:
    if most is not None and count > most:
        return Decision(
            Action.END, f"{what} {count} exceeds {field.partition(',')[0]}, which is {most}"
        )
    limit = "" if most is None else f" of at most {most}"
    return Decision(action, f"{what} {count}{limit} ({field})")
