"""Multiplexed mappings, as the trainer sees them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.config.build import write_json
from raymm.config.sections import ConfigError
from raymm.costs.named_devices import cluster_device
from raymm.costs.scaling_estimates import check_steps
from raymm.data import DataConfig
from raymm.draw import draw_loss, draw_timelines
from raymm.model.mapping_check import check_mapping
from raymm.model.modality_module import ModelError
from raymm.model.multimodal import MultimodalModule
from raymm.monitor.balance import batch_balance, mean_over_max
from raymm.monitor.observed_run import ObservedRun, ObservedStep
from raymm.monitor.throughput import TOTAL
from raymm.runtime.multiplexed import MultiplexedParallelModule
from raymm.scheduler.graph.strict_json import MultiplexError
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.program.timeline import Timeline, chrome_trace


class MultiplexedExecution:
    """Modules that share GPUs (:class:`raymm.training.execution.Execution`)."""

    def __init__(self, mapping: StageMapping) -> None:
        self.plan = mapping
        self.num_processes = mapping.gpus
        self.processes = {TOTAL: mapping.gpus}
        self.modules = {
            placement.module: placement.module
            for stage in mapping.stages for placement in stage.placements
        }

    def save(self, folder: Path) -> None:
        """Write ``mapping.json``, as ``raymm plan`` does."""
        write_json(folder / "mapping.json", json.loads(self.plan.to_json()))

    def check(self, model: MultimodalModule, data: Any, device: str) -> None:
        """Look whether the mapping can run this model on these data, before anything starts.

        Args:
            model, data, device: as of :meth:`raymm.training.execution.Execution.check`.

        Raises:
            MultiplexError, ModelError: a mapping of another model, quotas finer than what the
                cluster's GPUs set apart, or modules that cannot be split.
            ConfigError: an option of the data that only pipelined plans have.
        """
        check_mapping(model, self.plan)
        if device == "cuda":
            name, _ = cluster_device(device)
            check_steps(name, self.plan.steps)
        batching = data.batching if isinstance(data, DataConfig) else None
        rebalance = getattr(batching, "rebalance", None)
        if rebalance is not None:
            raise ConfigError(
                f"data.batching.rebalance is {rebalance!r}; with a multiplexed plan it "
                "must be left out: what it learns is what copies of pipelined stages take"
            )

    def unkept(self, model: MultimodalModule, data: Any) -> str | None:
        """It is of another model."""
        try:
            check_mapping(model, self.plan)
        except (MultiplexError, ModelError) as error:
            return f"the checkpoint's mapping: {error}"
        return None

    def describe(self, device: str, data: Any) -> list[str]:
        """Modules, stages and GPUs; and what the mapping was not planned for."""
        mapping = self.plan
        count = data.microbatches if isinstance(data, DataConfig) else 1
        lines = [
            f"{len(self.modules)} modules multiplexed on {mapping.gpus} GPUs ({device}) in "
            f"{len(mapping.stages)} stages, {count} microbatches per step"
        ]
        if count > 1:
            lines.append(
                f"note: data.microbatches is {count}: the mapping runs {count} times per step. "
                "`raymm plan` plans it for a step's samples at once (data.microbatches: 1)"
            )
        return lines

    def start(self, model: MultimodalModule, **options: Any) -> MultiplexedParallelModule:
        """Start the GPUs' processes; options as of :class:`MultiplexedParallelModule`."""
        return MultiplexedParallelModule(model, self.plan, **options)

    def observer(self, run: ObservedRun) -> MultiplexedObserver:
        """Balance and the report."""
        return MultiplexedObserver(run)


class MultiplexedObserver:
    """Watches the steps of a multiplexed run (:class:`raymm.training.execution.StepObserver`)."""

    def __init__(self, run: ObservedRun) -> None:
        self._run = run
        self._last: ObservedStep | None = None

    def after_step(self, step: ObservedStep) -> dict[str, Any]:
        """``balance``, whose ``copies`` are the GPUs of a module, and ``stage_busy``: the mean over
        these GPUs."""
        self._last = step
        model, whole = self._run.model, step.timeline.makespan or 1.0
        busy: dict[str, dict[int, float]] = {}
        for span in step.timeline.compute():
            of_module = busy.setdefault(span.stage.module, {})
            of_module[span.rank] = of_module.get(span.rank, 0.0) + span.end - span.start
        copies = {
            name: mean_over_max(list(seconds.values()))
            for name, seconds in busy.items() if len(seconds) > 1
        }
        balance = batch_balance(
            step.meta, model.encoder_names, model.packing, self._run.training.tokens, step.timeline
        )
        means = {
            name: round(sum(seconds.values()) / len(seconds) / whole, 4)
            for name, seconds in busy.items()
        }
        return {"balance": {**balance, "copies": copies}, "stage_busy": means}

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Loss curve, and the last step's schedule and trace: a row per module on a GPU."""
        folder = self._run.folder
        files = {"plan": folder / "mapping.json", "metrics": folder / "metrics.jsonl"}
        if any("loss" in row for row in history):
            files["loss curve"] = folder / "loss.png"
            draw_loss(history, files["loss curve"])
        if self._last is not None:
            module_rows, names = _module_rows(self._last.timeline)
            files["schedule"] = folder / "schedule.png"
            draw_timelines(
                [("measured", module_rows)], files["schedule"], rank_names=names,
                title=f"step {self._last.number}", bubble=self._last.timeline.mean_bubble,
            )
            files["trace"] = folder / "trace.json"
            write_json(files["trace"], chrome_trace([("measured", module_rows)], names))
        return files


def _module_rows(timeline: Timeline) -> tuple[Timeline, dict[int, str]]:
    """A timeline with a row for every module on a GPU, as they run at the same time; and names of
    rows."""
    places = sorted({(span.rank, span.stage) for span in timeline.spans})
    spans = tuple(
        span._replace(rank=places.index((span.rank, span.stage))) for span in timeline.spans
    )
    names = {row: f"GPU {gpu} {stage}" for row, (gpu, stage) in enumerate(places)}
    return Timeline(spans, len(places)), names
