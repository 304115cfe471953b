"""Invocation of callbacks, such that no callback can end a run."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from raymm.callbacks.callback import Callback, Restart, RunEnd, RunInfo, SavedCheckpoint
from raymm.errors import USER_CODE_RAISES
from raymm.files.run_files import write_whole

# File in the folder of the run with the traceback of a failed callback.
FAILED_FILE = "callback-{name}.txt"


class CallbackHandler:
    """Context manager that invokes the callbacks of one start of a run in order, and reports its
    end to them. ``say`` prints a line."""

    def __init__(
        self, callbacks: Sequence[Callback], folder: Path, say: Callable[[str], None]
    ) -> None:
        self._callbacks, self._folder, self._say = list(callbacks), folder, say
        self._end = RunEnd("finished")
        self._started = False

    def __enter__(self) -> CallbackHandler:
        return self

    def start(self, run: RunInfo) -> None:
        self._started = True
        self._call("on_start", run)

    def restart(self, restart: Restart) -> None:
        self._end = RunEnd("finished")
        self._call("on_restart", restart)

    @property
    def started(self) -> bool:
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
        self._call("on_step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._call("on_evaluation", row)

    def checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self._call("on_checkpoint", checkpoint)

    def stopped(self, text: str) -> None:
        """Record that the run was stopped by request; ``text`` describes the saved state."""
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
