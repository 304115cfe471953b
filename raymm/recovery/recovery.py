"""In-place recovery: a run continues in the remaining processes from a snapshot in host memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from raymm.actors.recovery.snapshots import Snapshots, TakenSnapshot
from raymm.errors import Loss, RunFailedError
from raymm.recovery.failure_policy import Action, Decision
from raymm.recovery.run_controller import RunController, RunState, first_line


class Recovery:
    """In-place recoveries of one attempt.

    Args:
        every: steps between snapshots; None to disable snapshots and recovery.
        pause: sleeps for some seconds, or until a stop is requested.

    Attributes:
        lost_node: True if the last recovery followed a lost node, which also loses data loaded
            there.
    """

    def __init__(
        self, parallel: Any, controller: RunController, every: int | None,
        say: Callable[[str], None], pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._parallel, self._controller, self._say = parallel, controller, say
        self._pause = pause
        self._every = every
        self._snapshots = Snapshots(parallel.group)
        self.count, self.lost_node = 0, False
        if self.enabled:
            parallel.group.keeps_survivors = True

    @property
    def enabled(self) -> bool:
        """True if snapshots are taken."""
        return self._every is not None

    def after_step(self, step: int, position: Any, first: bool = False) -> None:
        """Take a snapshot if one is due after a submitted step. Does not wait.

        Args:
            first: True for the first snapshot, which is always due.
        """
        if self._every is not None and (first or step % self._every == 0):
            self._snapshots.take(step, position)

    @property
    def newest(self) -> int | None:
        """Step of the newest snapshot; None without snapshots."""
        newest = self._snapshots.newest() if self.enabled else None
        return None if newest is None else newest.step

    @property
    def for_stragglers(self) -> bool:
        """True if the budget allows a recovery for a straggler and one more for a failure."""
        return self._controller.recoveries_left() > 1

    def goes_on(self, error: RunFailedError, recovering: bool = False) -> Decision | None:
        """Return the decision after an error; None if the current processes cannot recover.

        Args:
            recovering: True if the error happened during a recovery rather than a step.
        """
        group = self._parallel.group
        survives = group.ended is None and (
            group.interrupted is not None or error.lost is Loss.DATA_WORKER
        )
        if not self.enabled or not survives or self._snapshots.newest() is None:
            return None
        return self._controller.decide_on(error, in_place=True, recovering=recovering)

    def recover(self, error: RunFailedError) -> TakenSnapshot | None:
        """Replace the lost processes and restore the newest snapshot in all processes.

        Returns:
            The restored snapshot; None if no rank was lost and nothing had to be restored.

        Raises:
            RunFailedError: recovery in place is not possible: the same error, or one during
                recovery.
        """
        start, recovering, self.lost_node = time.perf_counter(), False, False
        while True:
            self.lost_node |= error.lost in (Loss.NODE, Loss.PREEMPTED_NODE)
            decision = self.goes_on(error, recovering)
            if decision is None or decision.action is not Action.RECOVER:
                raise error
            self._controller.enter(RunState.RECOVERING)
            recovering = True
            _let_go(error)
            self.count += 1
            self._say(f"{first_line(error)}: {decision.why}; recovering in place")
            self._pause(decision.wait_s)
            try:
                snapshot = self._back()
            except RunFailedError as another:
                error = another
                continue
            self._controller.enter(RunState.RUNNING)
            origin = "" if snapshot is None else f" from step {snapshot.step}"
            self._say(f"recovered{origin} in {time.perf_counter() - start:.2f} s")
            return snapshot

    def forget(self, steps: Sequence[Any]) -> None:
        """Discard pending outputs of steps that will be repeated."""
        for step in steps:
            step.forget()

    def _back(self) -> TakenSnapshot | None:
        if self._parallel.group.interrupted is None:
            return None
        self._parallel.renew()
        snapshot = self._snapshots.restore()
        self._parallel.restore_step(snapshot.step)
        # Replicas of the snapshot may have been lost with a process.
        self._snapshots.take(snapshot.step, snapshot.kept)
        return snapshot


def _let_go(error: BaseException) -> None:
    """Clear the frames of an error, which hold batches and thus data workers with resources."""
    current: BaseException | None = error
    while current is not None:
        traceback.clear_frames(current.__traceback__)
        current = current.with_traceback(None).__cause__
