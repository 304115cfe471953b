"""Attempts of a run: each resumes from the last checkpoint, until one finishes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from raymm.actors.faults.cluster_observer import dead_nodes
from raymm.errors import CheckpointError, ClusterError, RunFailedError
from raymm.recovery.failure_policy import Action, Cause, Decision
from raymm.recovery.run_controller import RunController, RunState, cause_of, first_line
from raymm.training.result import Result
from raymm.training.stop_request import StopRequest

# Seconds to wait until Ray detects that a node is dead. Until then, Ray would place processes
# there.
NODE_DEATH_S = 60.0


@dataclass(frozen=True)
class Attempted:
    """Summary of the earlier attempts of a run.

    Attributes:
        count: number of restarts so far.
    """

    count: int
    cause: Cause
    text: str


class Restarts:
    """Loop that restarts a run after interruptions for as long as the failure policy allows."""

    def __init__(
        self, controller: RunController, stop: StopRequest, say: Callable[[str], None]
    ) -> None:
        self._controller, self._stop, self._say = controller, stop, say
        self._count = 0

    def until_done(self, attempt: Callable[[Attempted | None], Result]) -> Result:
        """Run attempts until one finishes or the policy ends the run. Return the last result.

        Args:
            attempt: runs one attempt; called with the summary of the earlier ones, None for the
                first.

        Raises:
            RunFailedError: from the last attempt, with notes about the earlier interruptions.
            ClusterError: the cluster has no room for the first attempt.
        """
        ended: Result | RunFailedError | None = None
        attempted = None
        while True:
            try:
                self._controller.enter(RunState.INITIALIZING)
                ended = attempt(attempted)
                if (cause := self._wants_another(ended)) is None:
                    self._controller.enter(RunState.FINISHED)
                    return ended
                resizes = cause is Cause.RESIZE
                self._controller.enter(RunState.RESIZING if resizes else RunState.RECOVERING)
                text = ended.stopped or ""
                decision = self._controller.decide(cause, text)
            except ClusterError as error:
                if ended is None:
                    raise
                return self._end(ended, f"the run could not resume: {error}")
            except RunFailedError as error:
                ended = error.with_traceback(None)  # frees the attempt's objects
                self._controller.enter(RunState.RECOVERING)
                announced = self._reason_cause is Cause.PREEMPTION
                cause, text = cause_of(error, announced), first_line(error)
                decision = self._controller.decide_on(error, announced)
            decision = self._unless_asked_to_end(decision)
            if decision.action is not Action.GO_ON:
                return self._end(ended, decision.why, decision.action is Action.END_FOR_GOOD)
            self._say(f"{text}: {decision.why}; restarting with new processes")
            self._stop.pause(decision.wait_s)
            _wait_for_death(ended)
            self._stop.withdraw()
            self._count += 1
            attempted = Attempted(self._count, cause, text)

    def _wants_another(self, result: Result) -> Cause | None:
        reason = self._stop.reason
        return None if result.stopped is None or reason is None else reason.cause

    @property
    def _reason_cause(self) -> Cause | None:
        return None if self._stop.reason is None else self._stop.reason.cause

    def _unless_asked_to_end(self, decision: Decision) -> Decision:
        if self._stop.reason is not None and self._stop.reason.cause is None:
            return Decision(Action.END, f"{self._stop.reason.why} requested the end of the run")
        return decision

    def _end(self, ended: Result | RunFailedError, why: str, for_good: bool = False) -> Result:
        self._controller.enter(
            RunState.FINISHED if isinstance(ended, Result) else RunState.FAILED
        )
        if isinstance(ended, Result):
            self._say(f"{why}. Run the same command again to resume")
            return ended
        self._controller.add_notes(ended, why)
        if for_good:
            ended.end_for_good()
        raise ended


def _wait_for_death(ended: Result | RunFailedError) -> None:
    deadline = time.monotonic() + NODE_DEATH_S
    nodes = ended.nodes if isinstance(ended, RunFailedError) else frozenset()
    while nodes - dead_nodes() and time.monotonic() < deadline:
        time.sleep(0.2)


def what_is_left(error: RunFailedError, latest: Callable[[], object]) -> str:
    """Return a sentence about how to continue after a failed run."""
    try:
        checkpoint = latest()
    except CheckpointError as unseen:  # the storage may be what failed
        return f"Cannot look for the last checkpoint: {unseen}"
    if error.repeats:
        return f"The same command would fail in the same way. The last checkpoint is {checkpoint}."
    if checkpoint is None:
        return "There is no checkpoint: the same command starts from the beginning."
    return f"Run the same command again to resume from {checkpoint}."
