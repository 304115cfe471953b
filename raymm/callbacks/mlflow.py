"""Logging to MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from raymm.callbacks.callback import Callback, RunEnd, RunInfo, scalars
from raymm.callbacks.logger_run import logger_run_id
from raymm.packages import require

_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
# Limits of MLflow: length of a parameter value, and parameters per call.
_LONGEST_VALUE, _PARAMETERS_PER_CALL = 6000, 100


class MLflowCallback(Callback):
    """Callback that logs to an MLflow server or folder. A resumed run continues its MLflow run.

    Args:
        tracking_uri: server or folder; None for the value of ``MLFLOW_TRACKING_URI``.
        experiment: name of the experiment.

    Raises:
        ConfigError: mlflow is not installed.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "raymm") -> None:
        self._mlflow = require("mlflow", "mlflow", type(self).__name__)
        self._uri, self._experiment = tracking_uri, experiment
        self._client: Any = None
        self._id = ""

    def on_start(self, run: RunInfo) -> None:
        self._client = self._mlflow.MlflowClient(self._uri)
        self._id = logger_run_id(run, "mlflow", lambda: self._new_run(run))
        self._client.update_run(self._id, status="RUNNING")

    def _new_run(self, run: RunInfo) -> str:
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment) if existing is None
            else existing.experiment_id
        )
        run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        parameters = [
            self._mlflow.entities.Param(name, str(value)[:_LONGEST_VALUE])
            for name, value in run.config.items() if not isinstance(value, dict | list)
        ]
        for first in range(0, len(parameters), _PARAMETERS_PER_CALL):
            self._client.log_batch(run_id, params=parameters[first : first + _PARAMETERS_PER_CALL])
        return run_id

    def on_step(self, row: Mapping[str, Any]) -> None:
        timestamp_ms = self._mlflow.utils.time.get_current_time_millis()
        self._client.log_batch(self._id, [
            self._mlflow.entities.Metric(name, value, timestamp_ms, row["step"])
            for name, value in scalars(row).items()
        ])

    on_evaluation = on_step

    def on_end(self, end: RunEnd) -> None:
        self._client.set_terminated(self._id, _STATUS[end.status])
