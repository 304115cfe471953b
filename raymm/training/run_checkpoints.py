"""The checkpoints of a run's steps: what is saved, what is being written, and who is told."""

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

# Checkpoints in a row that could not be written behind the steps, until a run ends: a disk that is
# full is emptied, one that is gone does not come back by itself.
MOST_UNWRITTEN = 3


class RunCheckpoints:
    """Saves the state of a run, and tells of a checkpoint once it is committed.

    Args:
        store: keeps them.
        parallel: the model that runs.
        callbacks: are told.
        say: prints a line.
        asynchronous: steps go on while a checkpoint is written; at most one is under way.

    Attributes:
        saved: steps taken by the state that was saved last.
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
        self._unwritten = 0

    def take(self, position: Any) -> None:
        """Save the state of now, with nothing under way; steps may go on when this returns.

        Args:
            position: in the data.

        Raises:
            RunFileError: it cannot be written, or those before it could not
                (:data:`MOST_UNWRITTEN`).
            NotFiniteError: it is not finite, or the one before it was not.
        """
        self.finish()
        if not self._asynchronous:
            self.take_now(position)
            return
        start = time.perf_counter()
        self._store.start(self._parallel, {"data": position})
        self._stood_still = time.perf_counter() - start

    def take_now(self, position: Any) -> None:
        """Save the state of now; it is committed when this returns. As :meth:`take` else."""
        self.finish()
        start = time.perf_counter()
        folder = self._store.save(self._parallel, {"data": position})
        self._stood_still = time.perf_counter() - start
        self._tell(Saved(self._parallel.steps_taken, folder, self._stood_still))

    def look(self) -> bool:
        """Whether a checkpoint was committed since the last look; does not wait. Raises as
        :meth:`take`."""
        self._tell(self._asked(self._store.ended))
        committed, self._committed = self._committed, False
        return committed

    def finish(self) -> None:
        """Wait for what is being written, and say so. Raises as :meth:`take`."""
        if (step := self._store.under_way) is not None:
            self._say(f"waiting for the checkpoint of step {step}, which is still being written")
        start, group = time.perf_counter(), self._parallel.group
        while not self._store.wait(LISTEN_S):
            group.look_after()  # nobody waits for the ranks meanwhile
        saved = self._asked(self._store.finish)
        self._stood_still += time.perf_counter() - start
        self._tell(saved)

    def settle(self) -> None:
        """Wait for what is being written, as the run ends by an error; if that cannot be written
        either, say so."""
        try:
            self.finish()
        except Exception as error:  # what the run ends by is raised
            if self._parallel.group.ended is None:
                self._say(str(error))

    def abandon(self) -> None:
        """Do not wait: somebody wants the run to end at once."""
        self._store.abandon()

    def drop(self) -> None:
        """What is being written is not to be committed: the run goes back, and saves again."""
        self._store.abandon()
        self._store.remove_leftovers()

    def _asked(self, ask: Callable[[], Saved | None]) -> Saved | None:
        try:
            return ask()
        except RunFileError as error:
            self._unwritten += 1
            if self._unwritten >= MOST_UNWRITTEN:
                raise
            self._say(f"{error}. The run continues and saves at the next checkpoint")
            return None
        except RankFailedError:
            self._parallel.group.pids()  # raises who died, and why
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
