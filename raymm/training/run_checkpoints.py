"""Checkpoints of a run: when they are saved, background writes, and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from raymm.actors.recovery.observed_ranks import LISTEN_S
from raymm.callbacks.callback import SavedCheckpoint
from raymm.callbacks.handler import CallbackHandler
from raymm.errors import RankFailedError, RunFileError
from raymm.runtime.parallel_module import ParallelModule
from raymm.storage.background_save import Saved
from raymm.storage.checkpoint import CheckpointStore

# Consecutive failed background writes after which the run ends, and seconds since the first of them
# that must have passed: a run that saves every few seconds survives a short shortage, too. A full
# disk may be freed in time; a lost disk does not return by itself.
MOST_UNWRITTEN = 3
SHORTAGE_S = 60.0


class RunCheckpoints:
    """Saves the state of a run and calls the callbacks once a checkpoint is committed.

    Args:
        asynchronous: True to continue with steps while a checkpoint is written. At most one write
            is in flight.

    Attributes:
        saved: number of steps taken by the last saved state.
    """

    def __init__(
        self, store: CheckpointStore, parallel: ParallelModule, callbacks: CallbackHandler,
        say: Callable[[str], None], asynchronous: bool,
    ) -> None:
        self._store, self._parallel, self._callbacks = store, parallel, callbacks
        self._say, self._asynchronous = say, asynchronous
        self.saved = parallel.steps_taken
        self._stood_still = 0.0
        self._committed = False
        self._unwritten, self._unwritten_since = 0, 0.0

    def take(self, position: Any) -> None:
        """Save the current state. No step may be in flight; steps may continue when this returns.

        Raises:
            RunFileError: the checkpoint cannot be written, or :data:`MOST_UNWRITTEN` writes in a
                row, over :data:`SHORTAGE_S`, have failed.
            NotFiniteError: the state, or the previously written one, has non-finite values.
        """
        self.finish()
        if not self._asynchronous:
            self.take_now(position)
            return
        start = time.perf_counter()
        self._store.start(self._parallel, self._trainer_state(position))
        self._stood_still = time.perf_counter() - start

    def take_now(self, position: Any) -> None:
        """Save the current state and wait until it is committed. Raises as :meth:`take`."""
        self.finish()
        start = time.perf_counter()
        folder = self._store.save(self._parallel, self._trainer_state(position))
        self._stood_still = time.perf_counter() - start
        self._tell(Saved(self._parallel.steps_taken, folder, self._stood_still))

    def _trainer_state(self, position: Any) -> dict[str, Any]:
        hooks = self._callbacks.at_checkpoint(self._parallel.steps_taken)
        return {"data": position} | ({"hooks": hooks} if hooks else {})

    def look(self) -> bool:
        """Return True if a checkpoint was committed since the last call. Does not wait; raises as
        :meth:`take`."""
        self._tell(self._asked(self._store.ended))
        committed, self._committed = self._committed, False
        return committed

    def finish(self) -> None:
        """Wait for the write in flight. Raises as :meth:`take`."""
        if (step := self._store.under_way) is not None:
            self._say(f"waiting for the checkpoint of step {step}, which is still being written")
        start, group = time.perf_counter(), self._parallel.group
        while not self._store.wait(LISTEN_S):
            group.look_after()  # detect dead ranks while waiting
        saved = self._asked(self._store.finish)
        self._stood_still += time.perf_counter() - start
        self._tell(saved)

    def settle(self) -> None:
        """Wait for the write in flight when the run ends with an error. Log a failed write instead
        of raising."""
        try:
            self.finish()
        except Exception as error:  # the error that ends the run takes precedence
            if self._parallel.group.ended is None:
                self._say(str(error))

    def abandon(self) -> None:
        """Abandon the write in flight, because the run must end immediately."""
        self._store.abandon()

    def drop(self) -> None:
        """Discard the write in flight, because the run goes back to an earlier step and saves
        again."""
        self._store.abandon()
        self._store.remove_leftovers()

    def _asked(self, ask: Callable[[], Saved | None]) -> Saved | None:
        try:
            return ask()
        except RunFileError as error:
            now = time.monotonic()
            if not self._unwritten:
                self._unwritten_since = now
            self._unwritten += 1
            if self._unwritten >= MOST_UNWRITTEN and now - self._unwritten_since >= SHORTAGE_S:
                raise
            self._say(f"{error}. The run continues and saves at the next checkpoint")
            return None
        except RankFailedError:
            self._parallel.group.pids()  # raises an error that names the dead rank and the cause
            raise

    def _tell(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self._committed, self._unwritten = True, 0
        if (why := self._store.unremoved) is not None:
            self._say(why)
        self.saved = saved.step
        self._callbacks.checkpoint(
            SavedCheckpoint(saved.step, saved.folder, self._stood_still, saved.seconds)
        )
