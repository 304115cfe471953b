"""The attempts of a run, each from the last checkpoint, until one gets to its end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from raymm.actors.faults.cluster_observer import dead_nodes
from raymm.actors.placement.placement import ClusterError
from raymm.errors import ClusterLostError, NodeLostError, NodePreemptedError, RunFailedError
from raymm.training.failure_policy import (
    Action,
    Cause,
    Decision,
    FailurePolicy,
    Interruption,
)
from raymm.training.result import Result
from raymm.training.stop_request import StopRequest

# Seconds that Ray may take to find out that a node is dead. Until then it would place processes
# there.
NODE_DEATH_S = 60.0
# In errors: what is another time and again, of processes and addresses.
_PASSING = re.compile(r", process \d+ on [^)]*|[0-9a-f]{8,}|\d{3,}")


@dataclass(frozen=True)
class Attempted:
    """What the attempts before have come to.

    Attributes:
        count: of them.
        cause: why the last one ended.
        text: what happened to it.
    """

    count: int
    cause: Cause
    text: str


class Restarts:
    """Goes on after interruptions, as long as a policy says so.

    Args:
        policy: decides.
        stop: what asks an attempt to leave.
        step: that is under way; None before the first.
        say: prints a line.
    """

    def __init__(
        self, policy: FailurePolicy, stop: StopRequest, step: Callable[[], int | None],
        say: Callable[[str], None],
    ) -> None:
        self._policy, self._stop, self._step, self._say = policy, stop, step, say
        self._interruptions: list[Interruption] = []

    def until_done(self, attempt: Callable[[Attempted | None], Result]) -> Result:
        """
        Args:
            attempt: makes one; is given what has become of those before.

        Raises:
            RunFailedError: of the last attempt, with what happened to those before it.
            ClusterError: there is no room for the first.
        """
        ended: Result | RunFailedError | None = None
        attempted = None
        while True:
            try:
                ended = attempt(attempted)
                if (cause := self._wants_another(ended)) is None:
                    return ended
                text = ended.stopped or ""
            except ClusterError as error:
                if ended is None:
                    raise
                return self._end(ended, f"it could not go on: {error}")
            except RunFailedError as error:
                ended = error.with_traceback(None)  # its frames hold all that the attempt had
                cause, text = self._cause_of(error), str(error).partition("\n")[0]
            decision = self._decide(cause, text)
            if decision.action is not Action.GO_ON:
                return self._end(ended, decision.why, decision.action is Action.END_FOR_GOOD)
            self._say(f"{text}: {decision.why}, so the run goes on with other processes")
            _wait_for_death(ended)
            self._stop.withdraw()
            attempted = Attempted(len(self._interruptions), cause, text)

    def _wants_another(self, result: Result) -> Cause | None:
        reason = self._stop.reason
        return None if result.stopped is None or reason is None else reason.cause

    def _cause_of(self, error: RunFailedError) -> Cause:
        if error.repeats:
            return Cause.ERROR
        if isinstance(error, ClusterLostError) and not isinstance(error, NodeLostError):
            return Cause.CLUSTER
        announced = self._stop.reason is not None and self._stop.reason.cause is Cause.PREEMPTION
        if isinstance(error, NodePreemptedError) or announced:
            return Cause.PREEMPTION
        return Cause.FAILURE

    def _decide(self, cause: Cause, text: str) -> Decision:
        self._interruptions.append(Interruption(cause, self._step(), _PASSING.sub("", text)))
        if self._stop.reason is not None and self._stop.reason.cause is None:
            return Decision(Action.END, f"{self._stop.reason.why} asks it to end")
        return self._policy.decide(self._interruptions)

    def _end(self, ended: Result | RunFailedError, why: str, for_good: bool = False) -> Result:
        """
        Raises:
            RunFailedError: that one.
        """
        if isinstance(ended, Result):
            self._say(f"{why}. Start the same again to go on")
            return ended
        for number, before in enumerate(self._interruptions[:-1], start=1):
            at = "before the first step" if before.step is None else f"in step {before.step}"
            ended.add_note(f"Interrupted before: {number}, {at}: {before.text}")
        ended.add_note(f"The run does not go on by itself: {why}.")
        ended.repeats = ended.repeats or for_good
        raise ended


def _wait_for_death(ended: Result | RunFailedError) -> None:
    deadline = time.monotonic() + NODE_DEATH_S
    nodes = ended.nodes if isinstance(ended, NodeLostError) else frozenset()
    while nodes - dead_nodes() and time.monotonic() < deadline:
        time.sleep(0.2)
