"""Calling callbacks, so that none of them can end a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from raymm.callbacks.callback import Callback, Restart, RunEnd, RunInfo, SavedCheckpoint
from raymm.errors import USER_CODE_RAISES
from raymm.files.run_files import write_whole

# In the run's folder: the traceback of a callback that failed.
FAILED_FILE = "callback-{name}.txt"


class CallbackHandler:
    """The callbacks of one start of a run; a context that tells them of its end.

    Args:
        callbacks: in the order in which they are called.
        folder: of the run.
        say: prints a line.
    """

    def __init__(
        self, callbacks: Sequence[Callback], folder: Path, say: Callable[[str], None]
    ) -> None:
        self._callbacks, self._folder, self._say = list(callbacks), folder, say
        self._end = RunEnd("finished")
        self._started = False

    def __enter__(self) -> CallbackHandler:
        return self

    def start(self, run: RunInfo) -> None:
        """The first ranks have started."""
        self._started = True
        self._call("on_start", run)

    def restart(self, restart: Restart) -> None:
        """Others have, and the run goes on."""
        self._end = RunEnd("finished")
        self._call("on_restart", restart)

    @property
    def started(self) -> bool:
        """Whether :meth:`start` was called."""
        return self._started

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, KeyboardInterrupt | SystemExit):
            self._end = RunEnd("stopped", "at once")
        elif error is not None:
            self._end = RunEnd("failed", f"{type(error).__name__}: {error}")
        if self._started:
            self._call("on_end", self._end)

    def step(self, row: Mapping[str, Any]) -> None:
        """A step was taken."""
        self._call("on_step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """The held-out data were evaluated."""
        self._call("on_evaluation", row)

    def checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        """A checkpoint is on disk."""
        self._call("on_checkpoint", checkpoint)

    def stopped(self, text: str) -> None:
        """The run was asked to stop; ``text`` says what is saved."""
        self._end = RunEnd("stopped", text)

    def _call(self, method: str, argument: Any) -> None:
        for callback in list(self._callbacks):
            try:
                getattr(callback, method)(argument)
            except USER_CODE_RAISES as error:
                self._callbacks.remove(callback)
                self._say(self._failure(type(callback).__name__, method, error))

    def _failure(self, name: str, method: str, error: BaseException) -> str:
        path = self._folder / FAILED_FILE.format(name=name)
        text = f"callback {name} failed in {method}: {type(error).__name__}: {error}"
        try:
            write_whole(path, "".join(traceback.format_exception(error)))
        except OSError as unwritten:
            return f"{text}; the run continues without it ({path}: {unwritten})"
        return f"{text}; the run continues without it. Its traceback is in {path}"
