"""What a run is doing, and what has happened to it: one per start of a run."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from raymm.errors import (
    FailureKind,
    Loss,
    RunFailedError,
)
from raymm.recovery.failure_policy import Cause, Decision, FailurePolicy, Interruption
from raymm.recovery.run_state import RunState, checked

# In errors: what is another time and again, of processes and addresses.
_PASSING = re.compile(r", process \d+ on [^)]*|[0-9a-f]{8,}|\d{3,}|since \d+\.\d s")
_CAUSES = {FailureKind.RESOURCE: Cause.RESOURCES, FailureKind.CONNECTION: Cause.CONNECTION}


class RunController:
    """A run's state, and its interruptions, on which a policy decides.

    Args:
        policy: decides.
        step: that is under way; None before the first.
        clock: seconds, for budgets of an hour.

    Attributes:
        state: what the run is doing.
        interruptions: so far, oldest first.
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
        """The run does something else now.

        Args:
            state: what.

        Raises:
            InternalError: it cannot.
        """
        self.state = checked(self.state, state)

    def recoveries_left(self) -> float:
        """How many recoveries in the same processes the budget still has."""
        return self._policy.recoveries_left(self.interruptions, self._clock())

    def decide(
        self, cause: Cause, text: str, in_place: bool = False, recovering: bool = False
    ) -> Decision:
        """What to do after an interruption, which is noted.

        Args:
            cause: of it.
            text: what happened.
            in_place: whether processes have survived that can go on.
            recovering: whether they were being put together again.
        """
        self.interruptions.append(Interruption(
            cause, self._step(), _PASSING.sub("", text), self._clock(), in_place, recovering
        ))
        return self._policy.decide(self.interruptions)

    def decide_on(
        self, error: RunFailedError, announced: bool = False, in_place: bool = False,
        recovering: bool = False,
    ) -> Decision:
        """:meth:`decide`, once of every error.

        Args:
            error: what happened.
            announced: whether a node was to end.
            in_place, recovering: as of :meth:`decide`.
        """
        if self._decided is None or self._decided[0] is not error:
            cause, text = cause_of(error, announced), first_line(error)
            self._decided = error, self.decide(cause, text, in_place, recovering)
        return self._decided[1]

    def add_notes(self, error: BaseException, why: str) -> None:
        """Say with an error what has happened before, and why the run does not go on.

        Args:
            error: that the run ends by.
            why: in words.
        """
        for number, before in enumerate(self.interruptions[:-1], start=1):
            error.add_note(f"Earlier interruption {number}, {before.where}: {before.text}")
        error.add_note(f"The run does not resume by itself: {why}.")


def first_line(error: BaseException) -> str:
    """What happened, without what ranks were doing."""
    return str(error).partition("\n")[0]


def cause_of(error: RunFailedError, announced: bool = False) -> Cause:
    """Of an attempt that ended by an error.

    Args:
        error: the error.
        announced: whether a node was to end.
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
