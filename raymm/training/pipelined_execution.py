"""Pipelined plans, as the trainer sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.config.build import write_json
from raymm.data import DataConfig
from raymm.layout.plan_check import differences
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.monitor.balance import step_balance
from raymm.monitor.drift_observer import DriftObserver
from raymm.monitor.observed_run import ObservedRun, ObservedStep
from raymm.monitor.rebalancing import rebalancing
from raymm.monitor.report import RunReport
from raymm.monitor.throughput import TOTAL
from raymm.runtime.pipelined import MultimodalParallelModule
from raymm.scheduler.plan.plan import Plan


class PipelinedExecution:
    """Stages on ranks of their own (:class:`raymm.training.execution.Execution`)."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.num_processes = plan.num_processes
        self.modules = {str(stage.id): stage.module for stage in plan.stages}
        self.processes = {TOTAL: plan.num_processes}
        modules_of: dict[int, set[str]] = {}
        for stage in plan.stages:
            modules_of.setdefault(stage.rank, set()).add(stage.module)
        for module in set(self.modules.values()):
            ranks = [rank for rank, modules in modules_of.items() if module in modules]
            if all(modules_of[rank] == {module} for rank in ranks):
                self.processes[module] = sum(map(plan.processes, ranks))

    def save(self, folder: Path) -> None:
        """Write ``plan.json``."""
        write_json(folder / "plan.json", self.plan.to_dict())

    def check(self, model: MultimodalModule, data: Any, device: str) -> None:
        """Nothing that starting does not check.

        Args:
            model, data, device: as of :meth:`raymm.training.execution.Execution.check`.
        """

    def unkept(self, model: MultimodalModule, data: Any) -> str | None:
        """It is of another model, or of another number of microbatches."""
        different = differences(self.plan.graph, module_graph(model))
        if different:
            return f"the checkpoint's plan is of another model: {'; '.join(different)}"
        microbatches = data.microbatches if isinstance(data, DataConfig) else None
        if microbatches is not None and self.plan.num_microbatches != microbatches:
            return (
                f"the checkpoint's plan has {self.plan.num_microbatches} microbatches, the data "
                f"{microbatches}"
            )
        return None

    def describe(self, device: str, data: Any) -> list[str]:
        """Stages, ranks and microbatches."""
        plan = self.plan
        more = f"{plan.num_processes} processes, " if plan.num_processes > plan.num_ranks else ""
        return [
            f"{len(plan.stages)} stages on {plan.num_ranks} ranks ({more}{device}), "
            f"{plan.num_microbatches} microbatches per step"
        ]

    def start(self, model: MultimodalModule, **options: Any) -> MultimodalParallelModule:
        """Start the ranks; options as of :class:`MultimodalParallelModule`."""
        return MultimodalParallelModule(model, self.plan, **options)

    def observer(self, run: ObservedRun) -> PipelinedObserver:
        """Balance, rebalancing, drift from the plan's profile, and the report."""
        return PipelinedObserver(run, self.plan)


class PipelinedObserver:
    """Watches the steps of a pipelined run (:class:`raymm.training.execution.StepObserver`)."""

    def __init__(self, run: ObservedRun, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._report = RunReport(run.folder, plan, run.parallel.options.device)
        self._rebalancing = rebalancing(
            run.data, run.training.sampler, plan, run.model.packing, run.folder,
            run.parallel.steps_taken, run.say,
        )
        self._drift = DriftObserver(plan, run.folder, run.say)

    def after_step(self, step: ObservedStep) -> dict[str, Any]:
        """``balance``, and ``plan_drift`` where the plan has a profile."""
        run, timeline = self._run, step.timeline
        program = run.parallel.program([sorted(microbatch.items) for microbatch in step.meta])
        self._report.add(step.number, program, timeline)
        fitted = self._rebalancing and self._rebalancing.after_step(
            step.number, step.state_after, len(step.meta), step.complete, timeline
        )
        return {
            "balance": step_balance(
                step.meta, run.model.encoder_names, run.model.packing, run.training.tokens,
                self._plan, timeline,
            ) | (fitted or {}),
            **self._drift.after_step(step.number, step.meta, timeline),
        }

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Plan, pictures and trace."""
        return self._report.write(history)
