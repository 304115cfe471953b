"""TensorBoard: ``torch.utils.tensorboard``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raymm.callbacks.callback import Callback, Restart, RunEnd, RunInfo, scalars
from raymm.packages import require


class TensorBoardCallback(Callback):
    """Writes event files. What a run that goes on takes again, TensorBoard leaves out.

    Args:
        folder: for the files; by default ``tensorboard`` in the run's folder.

    Raises:
        ConfigError: TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path | None = None) -> None:
        require("tensorboard", "tensorboard", type(self).__name__)
        from torch.utils import tensorboard

        self._module = tensorboard
        self._folder = folder
        self._writer: Any = None

    def on_start(self, run: RunInfo) -> None:
        """Open a file of events."""
        folder = run.folder / "tensorboard" if self._folder is None else Path(self._folder)
        self._writer = self._module.SummaryWriter(
            str(folder), purge_step=run.first_step + 1 if run.first_step else None
        )

    def on_restart(self, restart: Restart) -> None:
        """Another file; the steps that are taken again are left out of the one before."""
        self._writer.close()
        self.on_start(restart.run)

    def on_step(self, row: Mapping[str, Any]) -> None:
        """A scalar for every number of the row."""
        for name, value in scalars(row).items():
            self._writer.add_scalar(name, value, row["step"])

    on_evaluation = on_step

    def on_end(self, end: RunEnd) -> None:
        """Write what is left."""
        self._writer.close()
