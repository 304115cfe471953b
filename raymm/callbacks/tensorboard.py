"""Logging to TensorBoard with ``torch.utils.tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymm.callbacks.callback import Callback, Restart, RunEnd, RunInfo, scalars
from raymm.packages import require


class TensorBoardCallback(Callback):
    """Callback that writes event files to ``folder``, by default ``tensorboard`` in the folder of
    the run. After a resume, steps that are taken again replace the earlier ones. Raises a
    ``ConfigError`` if TensorBoard is not installed."""

    def __init__(self, folder: str | Path | None = None) -> None:
        require("tensorboard", "tensorboard", type(self).__name__)
        from torch.utils import tensorboard

        self._module = tensorboard
        self._folder = folder
        self._writer: Any = None

    def on_start(self, run: RunInfo) -> None:
        folder = run.folder / "tensorboard" if self._folder is None else Path(self._folder)
        self._writer = self._module.SummaryWriter(
            str(folder), purge_step=run.first_step + 1 if run.first_step else None
        )

    def on_restart(self, restart: Restart) -> None:
        """Open another file, which hides the steps of the earlier file that are taken again."""
        self._writer.close()
        self.on_start(restart.run)

    def on_step(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    on_evaluation = on_step

    def on_end(self, end: RunEnd) -> None:
        self._writer.close()
