"""State and interruptions of a run, from one start of the command to its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from raymm.errors import FailureKind, Loss, RunFailedError
from raymm.recovery.failure_policy import Cause, Decision, FailurePolicy, Interruption
from raymm.recovery.run_state import RunState, checked

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
