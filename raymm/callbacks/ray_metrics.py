"""Export of metrics of a run through its Ray cluster, for Prometheus and Grafana."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ray.util.metrics import Counter, Gauge

from raymm.callbacks.callback import Callback, Restart, RunEnd, RunInfo, SavedCheckpoint


@dataclass(frozen=True)
class MetricSpec:
    """Metric that Ray exports as ``ray_`` + name. The name includes the unit; all metrics also have
    the tag ``run``."""

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    tags: tuple[str, ...] = ()


# Seconds after which gauges are set again; by default, Ray reports every ten seconds.
REPEAT_S = 5.0
_STAGE = ("module", "stage")
METRICS = {
    spec.name: spec for spec in (
        MetricSpec("raymm_step", "gauge", "Steps taken, over all starts of the run."),
        MetricSpec("raymm_steps_total", "counter", "Steps taken since this start."),
        MetricSpec("raymm_tokens_total", "counter", "Text tokens trained on since this start."),
        MetricSpec("raymm_loss", "gauge", "Loss of the last step."),
        MetricSpec("raymm_heldout_loss", "gauge", "Loss on the held-out data."),
        MetricSpec("raymm_grad_norm", "gauge", "Norm of all gradients, before clipping."),
        MetricSpec("raymm_learning_rate", "gauge", "Learning rate of the last step."),
        MetricSpec("raymm_tokens_per_second", "gauge", "Text tokens per second."),
        MetricSpec("raymm_tflops", "gauge", "10^12 FLOP/s of a step.", ("module",)),
        MetricSpec("raymm_mfu", "gauge", "FLOP/s over the GPUs' peak.", ("module",)),
        MetricSpec("raymm_step_seconds", "gauge", "Duration of the last step."),
        MetricSpec("raymm_data_wait_seconds", "gauge", "Time the driver waited for data."),
        MetricSpec("raymm_stage_busy_ratio", "gauge", "Share of a step a stage computed.", _STAGE),
        MetricSpec("raymm_stage_bubble_ratio", "gauge", "Share of a step a stage idled.", _STAGE),
        MetricSpec(
            "raymm_peak_memory_bytes", "gauge", "Most memory a process has held.", ("process",)
        ),
        MetricSpec(
            "raymm_expert_imbalance_ratio", "gauge",
            "Tokens of a layer's fullest expert, over the mean.", ("layer",),
        ),
        MetricSpec("raymm_checkpoint_seconds", "gauge", "Time a checkpoint stopped the run."),
        MetricSpec("raymm_checkpoint_step", "gauge", "Step of the last checkpoint."),
        MetricSpec("raymm_steps_not_applied_total", "counter", "Steps skipped as not finite."),
        MetricSpec("raymm_samples_skipped_total", "counter", "Samples left out of their steps."),
        MetricSpec(
            "raymm_restarts_total", "counter", "Restarts with other processes.",
            ("cause",),
        ),
        MetricSpec("raymm_running", "gauge", "1 while the run is active, 0 after its end."),
    )
}
# Fields of the row of a step that are exported unchanged as a gauge.
_FIELDS = {
    "step": "raymm_step", "loss": "raymm_loss", "grad_norm": "raymm_grad_norm",
    "learning_rate": "raymm_learning_rate", "tokens_per_s": "raymm_tokens_per_second",
    "seconds": "raymm_step_seconds", "data_wait_s": "raymm_data_wait_seconds",
}


class RayMetrics(Callback):
    """Callback that sets gauges and counters of Ray (``ray.util.metrics``) with the tag ``run``
    (the name of the folder of the run). They are sent to the metrics agent of the driver's node
    every few seconds, whether or not they are scraped. Every trainer has this callback.

    Ray drops a gauge that is not set within two reports, 20 s by default. A step may take longer,
    so a thread repeats the values until the run ends.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._metrics: dict[str, Gauge | Counter] = {}
        self._run = ""
        self._modules: Mapping[str, str] = {}

    def on_start(self, run: RunInfo) -> None:
        self._run, self._modules = run.name, run.modules
        for spec in METRICS.values():
            kind = Gauge if spec.kind == "gauge" else Counter
            self._metrics[spec.name] = kind(spec.name, spec.help, ("run", *spec.tags))
        self._set("raymm_running", 1)
        self._set("raymm_step", run.first_step)
        self._ended.clear()
        threading.Thread(target=self._repeat, name="raymm-metrics", daemon=True).start()

    def on_restart(self, restart: Restart) -> None:
        """Count the restart, and clear the values of earlier stages and processes."""
        self._modules = restart.run.modules
        with self._lock:
            for key in [key for key in self._values if key[1]]:
                del self._values[key]
        self._set("raymm_step", restart.run.first_step)
        self._add("raymm_restarts_total", 1, {"cause": restart.cause})

    def on_step(self, row: Mapping[str, Any]) -> None:
        for field, name in _FIELDS.items():
            self._set(name, row.get(field))
        self._add("raymm_steps_total", 1)
        self._add("raymm_tokens_total", row["tokens"])
        self._add("raymm_steps_not_applied_total", int("not_applied" in row))
        self._add("raymm_samples_skipped_total", row.get("skipped", 0))
        for layer, ratio in row.get("expert_imbalance", {}).items():
            self._set("raymm_expert_imbalance_ratio", ratio, {"layer": layer})
        for stage, busy in row.get("stage_busy", {}).items():
            tags = {"module": self._modules.get(stage, stage), "stage": stage}
            self._set("raymm_stage_busy_ratio", busy, tags)
            self._set("raymm_stage_bubble_ratio", max(0.0, 1 - busy), tags)
        for field in ("tflops", "mfu"):
            for module, value in row.get(field, {}).items():
                self._set(f"raymm_{field}", value, {"module": module})
        peaks: Sequence[float | None] = row.get("peak_memory_bytes", ())
        for process, peak in enumerate(peaks):
            self._set("raymm_peak_memory_bytes", peak, {"process": str(process)})

    def on_evaluation(self, row: Mapping[str, Any]) -> None:
        self._set("raymm_heldout_loss", row.get("heldout_loss"))

    def on_checkpoint(self, checkpoint: SavedCheckpoint) -> None:
        self._set("raymm_checkpoint_seconds", checkpoint.seconds)
        self._set("raymm_checkpoint_step", checkpoint.step)

    def on_end(self, end: RunEnd) -> None:
        """Report the run as ended, and stop repeating values."""
        self._set("raymm_running", 0)
        self._ended.set()
        with self._lock:
            self._values.clear()

    def _set(self, name: str, value: float | None, tags: Mapping[str, str] | None = None) -> None:
        if value is None:  # rows have None for a loss that is not finite
            return
        with self._lock:
            self._values[name, tuple((tags or {}).items())] = value
            self._export(name, value, tags or {})

    def _export(self, name: str, value: float, tags: Mapping[str, str]) -> None:
        metric = self._metrics[name]
        assert isinstance(metric, Gauge)
        metric.set(value, {"run": self._run, **tags})

    def _repeat(self) -> None:
        while not self._ended.wait(REPEAT_S):
            with self._lock:
                for (name, tags), value in self._values.items():
                    self._export(name, value, dict(tags))

    def _add(self, name: str, value: int, tags: Mapping[str, str] | None = None) -> None:
        metric = self._metrics[name]
        assert isinstance(metric, Counter)
        if value > 0:  # Ray rejects increments of 0
            metric.inc(value, {"run": self._run, **(tags or {})})
