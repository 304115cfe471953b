"""Logging to Weights & Biases."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from raymm.callbacks.callback import Callback, RunEnd, RunInfo, scalars
from raymm.callbacks.logger_run import logger_run_id
from raymm.packages import require

_EXIT_CODES = {"finished": 0, "stopped": 0, "failed": 1}


class WandbCallback(Callback):
    """Callback that logs to Weights & Biases. Its environment variables apply
    (``WANDB_MODE=offline``). A resumed run continues its run there. Raises a ``ConfigError`` if
    wandb is not installed.

    Args:
        options: options of ``wandb.init`` (``project``, ``entity``, ``mode``, ...). By default,
            ``name`` and ``dir`` are those of the folder of the run.
    """

    def __init__(self, **options: Any) -> None:
        self._wandb = require("wandb", "wandb", type(self).__name__)
        self._options = options
        self._run: Any = None

    def on_start(self, run: RunInfo) -> None:
        options = {"name": run.name, "dir": str(run.folder), **self._options}
        identity = logger_run_id(run, "wandb", lambda: secrets.token_hex(4))
        self._run = self._wandb.init(
            **{"id": identity, "resume": "allow", "config": dict(run.config), **options}
        )
        # A separate step metric, because wandb's step counter rejects steps that are taken again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def on_step(self, row: Mapping[str, Any]) -> None:
        self._run.log({"step": row["step"], **scalars(row)})

    on_evaluation = on_step

    def on_end(self, end: RunEnd) -> None:
        """Wait until all data are sent or written to a file."""
        self._run.finish(exit_code=_EXIT_CODES[end.status])
