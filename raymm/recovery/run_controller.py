"""State and interruptions of a run, from one start of the command to its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from enum import Enum

from raymm.errors import FailureKind, InternalError, Loss, RunFailedError
from raymm.recovery.failure_policy import Cause, Decision, FailurePolicy, Interruption


class RunState(Enum):
    """State of a run."""

    INITIALIZING = "initializing"
    """Processes start and load the state to resume from."""
    RUNNING = "running"
    """Steps and evaluations run."""
    SAVING = "saving"
    """Steps wait for a checkpoint, or for its copy in host memory."""
    RECOVERING = "recovering"
    """Lost processes are replaced, or the attempt ends."""
    RESIZING = "resizing"
    """Processes end because the cluster has room for another number of them."""
    FINISHED = "finished"
    """All steps are taken, or a stop was requested."""
    FAILED = "failed"
    """The run failed and does not resume by itself."""


_ENDS = {RunState.FINISHED, RunState.FAILED}
TRANSITIONS: Mapping[RunState, frozenset[RunState]] = {
    RunState.INITIALIZING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    RunState.RUNNING: frozenset({RunState.SAVING, RunState.RECOVERING, RunState.RESIZING, *_ENDS}),
    RunState.SAVING: frozenset({RunState.RUNNING, RunState.RECOVERING, *_ENDS}),
    # To RUNNING in the same processes, to INITIALIZING in new ones.
    RunState.RECOVERING: frozenset({RunState.RUNNING, RunState.INITIALIZING, *_ENDS}),
    RunState.RESIZING: frozenset({RunState.INITIALIZING, *_ENDS}),
    RunState.FINISHED: frozenset(),
    RunState.FAILED: frozenset(),
}


def checked(before: RunState, after: RunState) -> RunState:
    """Return the new state if the transition is allowed; a state may follow itself. Raise an
    ``InternalError`` if :data:`TRANSITIONS` has no such transition."""
    if after is not before and after not in TRANSITIONS[before]:
        raise InternalError(f"the run state cannot change from {before.value} to {after.value}")
    return after


# Parts of error messages that differ between repetitions: processes and addresses.
_PASSING = re.compile(r", process \d+ on [^)]*|[0-9a-f]{8,}|\d{3,}|since \d+\.\d s")
_CAUSES = {FailureKind.RESOURCE: Cause.RESOURCES, FailureKind.CONNECTION: Cause.CONNECTION}


class RunController:
    """Keeps a run's state and interruptions, and applies the failure policy.

    Args:
        step: returns the step in flight; None before the first step.
        clock: returns seconds, for hourly budgets.
    """

    def __init__(
        self, policy: FailurePolicy, step: Callable[[], int | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._step, self._clock = policy, step, clock
        self.state = RunState.INITIALIZING
        self.interruptions: list[Interruption] = []
        self._decided: tuple[BaseException, Decision] | None = None

    def enter(self, state: RunState) -> None:
        """Change the state of the run. Raise an ``InternalError`` if the transition is not allowed.
        """
        self.state = checked(self.state, state)

    def recoveries_left(self) -> float:
        """Return how many in-place recoveries the budget still allows."""
        return self._policy.recoveries_left(self.interruptions, self._clock())

    def decide(
        self, cause: Cause, text: str, in_place: bool = False, recovering: bool = False
    ) -> Decision:
        """Record an interruption and return the decision about it.

        Args:
            in_place: True if enough processes survived to recover in place.
            recovering: True if the interruption happened during a recovery.
        """
        self.interruptions.append(Interruption(
            cause, self._step(), _PASSING.sub("", text), self._clock(), in_place, recovering
        ))
        return self._policy.decide(self.interruptions)

    def decide_on(
        self, error: RunFailedError, announced: bool = False, in_place: bool = False,
        recovering: bool = False,
    ) -> Decision:
        """Return :meth:`decide` for an error. The same error is recorded only once.

        Args:
            announced: True if a notice said that a node of the run would end.
        """
        if self._decided is None or self._decided[0] is not error:
            cause, text = cause_of(error, announced), first_line(error)
            self._decided = error, self.decide(cause, text, in_place, recovering)
        return self._decided[1]

    def add_notes(self, error: BaseException, why: str) -> None:
        """Add notes to an error: the earlier interruptions, and why the run does not resume."""
        for number, earlier in enumerate(self.interruptions[:-1], start=1):
            error.add_note(f"Earlier interruption {number}, {earlier.where}: {earlier.text}")
        error.add_note(f"The run does not resume by itself: {why}.")


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without the activity of the ranks."""
    return str(error).partition("\n")[0]


def cause_of(error: RunFailedError, announced: bool = False) -> Cause:
    """Return the cause of an attempt that ended with an error.

    Args:
        announced: True if a notice said that a node of the run would end.
    """
    if error.kind in _CAUSES:
        return _CAUSES[error.kind]
    if error.repeats:
        return Cause.ERROR
    if error.lost is Loss.CLUSTER:
        return Cause.CLUSTER
    if error.lost is Loss.PREEMPTED_NODE or announced:
        return Cause.PREEMPTION
    return Cause.FAILURE
