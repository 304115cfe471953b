"""A run goes on in the processes that are left, from a snapshot in host memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from raymm.actors.recovery.snapshots import Snapshots, TakenSnapshot
from raymm.errors import Loss, RunFailedError
from raymm.recovery.failure_policy import Action, Decision
from raymm.recovery.run_controller import RunController, first_line
from raymm.recovery.run_state import RunState
from raymm.runtime.plan_module import PlannedModule


class Recovery:
    """Recoveries of one attempt of a run.

    Args:
        parallel: the model that runs.
        controller: of the run; decides.
        every: steps between snapshots; None: there are none, and no recovery.
        say: prints a line.
        pause: waits for some seconds, or until the run is asked to end.

    Attributes:
        count: recoveries so far.
        lost_node: whether the last one was of a lost node, and what was loaded there is lost, too.
    """

    def __init__(
        self, parallel: Any, controller: RunController, every: int | None,
        say: Callable[[str], None], pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._parallel, self._controller, self._say = parallel, controller, say
        self._pause = pause
        self._every = every if isinstance(parallel, PlannedModule) else None
        self._snapshots = Snapshots(parallel.group)
        self.count, self.lost_node = 0, False
        if self.enabled:
            parallel.group.keeps_survivors = True

    @property
    def enabled(self) -> bool:
        """Whether snapshots are taken."""
        return self._every is not None

    def after_step(self, step: int, position: Any, first: bool = False) -> None:
        """A step was submitted, after which a snapshot may be due. Does not wait.

        Args:
            step: its number.
            position: in the data after it.
            first: none was taken yet: one is due.
        """
        if self._every is not None and (first or step % self._every == 0):
            self._snapshots.take(step, position)

    @property
    def newest(self) -> int | None:
        """Step of the newest snapshot; None if there is none."""
        newest = self._snapshots.newest() if self.enabled else None
        return None if newest is None else newest.step

    @property
    def for_stragglers(self) -> bool:
        """Whether the budget has a recovery for one that is slow, and another one for a loss."""
        return self._controller.recoveries_left() > 1

    def goes_on(self, error: RunFailedError, recovering: bool = False) -> Decision | None:
        """What to do after an error; None: there is no going on in these processes.

        Args:
            error: what happened.
            recovering: in a recovery, and not by a step.
        """
        group = self._parallel.group
        survives = group.ended is None and (
            group.interrupted is not None or error.lost is Loss.DATA_WORKER
        )
        if not self.enabled or not survives or self._snapshots.newest() is None:
            return None
        return self._controller.decide_on(error, in_place=True, recovering=recovering)

    def recover(self, error: RunFailedError) -> TakenSnapshot | None:
        """Have other processes take the places of those that are lost, and all go back to the
        newest snapshot; returns it. None: no rank was lost, and there is nothing to go back to.

        Args:
            error: what happened.

        Raises:
            RunFailedError: that, or what happened meanwhile: it does not go on in these processes.
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
            at = "" if snapshot is None else f" from step {snapshot.step}"
            self._say(f"recovered{at} in {time.perf_counter() - start:.2f} s")
            return snapshot

    def forget(self, steps: Sequence[Any]) -> None:
        """Steps that were under way are taken again.

        Args:
            steps: what was to be their outputs.
        """
        for step in steps:
            step.forget()

    def _back(self) -> TakenSnapshot | None:
        if self._parallel.group.interrupted is None:
            return None
        self._parallel.renew()
        snapshot = self._snapshots.restore()
        self._parallel.restore_step(snapshot.step)
        # Parts of it may have lain with a process that is gone.
        self._snapshots.take(snapshot.step, snapshot.kept)
        return snapshot


def _let_go(error: BaseException) -> None:
    """Frames of what an error ended hold what it had: batches, and with them data workers, whose
    places others are to have."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.with_traceback(None).__cause__
