"""Start and observation of a plan, as the trainer uses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raymm.config.build import write_json
from raymm.data import DataConfig
from raymm.layout.plan_check import differences
from raymm.model.model import Model
from raymm.monitor.balance import step_balance
from raymm.monitor.drift_observer import DriftObserver
from raymm.monitor.observed_run import ObservedRun, ObservedStep
from raymm.monitor.report import RunReport
from raymm.monitor.stragglers import StragglerObserver
from raymm.monitor.throughput import TOTAL
from raymm.packages import import_object
from raymm.plural import plural
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.plan.plan import Plan

# Feature that is imported when a run starts.
REBALANCING = "raymm.monitor.rebalancing:rebalancing"


class Execution:
    """Plan that the trainer starts and observes.

    Attributes:
        modules: stage name, as in a step's ``stage_busy``, -> module name.
        processes: module name -> number of processes that compute only this module. Modules that
            share ranks are left out; ``"total"`` counts all processes.
    """

    def __init__(self, plan: Plan, notes: Sequence[str] = ()) -> None:
        self.plan, self._notes = plan, notes
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
        """Write the plan to ``plan.json`` in a folder."""
        write_json(folder / "plan.json", self.plan.to_dict())

    def unkept(self, model: Model, data: Any) -> str | None:
        """Return why a resumed run cannot keep this plan (other model or number of microbatches),
        or None."""
        different = differences(self.plan.graph, model.graph)
        if different:
            return f"the checkpoint's plan is for a different model: {'; '.join(different)}"
        microbatches = data.microbatches if isinstance(data, DataConfig) else None
        if microbatches is not None and self.plan.num_microbatches != microbatches:
            return (
                f"the checkpoint's plan has "
                f"{plural(self.plan.num_microbatches, 'microbatch', 'es')}, but "
                f"data.microbatches is {microbatches}"
            )
        return None

    def describe(self, device: str) -> list[str]:
        """Return lines that describe the plan. The trainer continues the first line."""
        plan, count = self.plan, self.plan.num_microbatches
        extra = f"{plan.num_processes} processes, " if plan.num_processes > plan.num_ranks else ""
        slots = len({stage.slot for stage in plan.stages})
        stages = plural(len(plan.stages), "stage")
        stages += f" in {plural(slots, 'slot')}" if plan.uses_slots else ""
        lines = [
            f"{stages} on {plural(plan.num_ranks, 'rank')} ({extra}{device}), "
            f"{plural(count, 'microbatch', 'es')} per step"
        ]
        if count > 1 and plan.uses_slots:
            lines.append(
                f"note: data.microbatches is {count}, so the mapping runs {plural(count, 'time')} "
                "per step; "
                "set data.microbatches: 1 and run `raymm plan` to plan for all samples at once"
            )
        return [*lines, *self._notes]

    def check(self, model: Model, **options: Any) -> None:
        """Raise the errors of :meth:`start` that occur before processes start. Needs no cluster."""
        ParallelModel.check_plan(model, self.plan, RuntimeOptions.of(options))

    def start(
        self, model: Model, **options: Any
    ) -> ParallelModel:
        """Start the ranks. Options are those of :class:`raymm.runtime.options.RuntimeOptions`."""
        return ParallelModel(model, self.plan, **options)

    def observer(self, run: ObservedRun) -> StepObserver:
        """Return an observer of the steps of a run."""
        return StepObserver(run, self.plan)


class StepObserver:
    """Observer of steps: balance, rebalancing, plan drift, stragglers and the final report."""

    def __init__(self, run: ObservedRun, plan: Plan) -> None:
        self._run, self._plan = run, plan
        self._report = RunReport(
            run.folder, plan, run.parallel.step_program, run.parallel.options.device
        )
        self._rebalancing = import_object(REBALANCING)(run, plan)
        self._drift = DriftObserver(plan, run.folder, run.say)
        self.stragglers = StragglerObserver(plan, run.say)

    def after_step(self, step: ObservedStep) -> dict[str, Any]:
        """Return the step's ``balance``, ``straggler`` if there is one, and ``plan_drift`` if the
        plan has a profile, for ``metrics.jsonl``."""
        run, timeline = self._run, step.timeline
        self._report.add(step.number, step.meta, timeline)
        fitted = self._rebalancing and self._rebalancing.after_step(
            step.number, step.state_after, len(step.meta), step.complete, timeline
        )
        return {
            "balance": step_balance(
                step.meta, run.model.encoder_names, run.model.packing, run.training.tokens,
                self._plan, timeline,
            ) | (fitted or {}),
            **self._drift.after_step(step.number, step.meta, timeline),
            **self.stragglers.after_step(step.number, timeline),
        }

    def write(self, history: Sequence[Mapping[str, Any]]) -> dict[str, Path]:
        """Write plan, pictures and trace; return the files by description."""
        return self._report.write(history)
