"""One attempt of a run: the steps taken by one set of processes, until they end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from raymm.callbacks.callback import Restart, RunInfo
from raymm.callbacks.handler import CallbackHandler
from raymm.config.sections import RunConfig
from raymm.data import DataConfig
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.errors import Loss, RunFailedError
from raymm.evaluation.first_scores import keep_references
from raymm.evaluation.text_evaluation import TextEvaluation
from raymm.model.model import Model
from raymm.monitor.drain_notices import DrainObserver
from raymm.monitor.metrics import METRICS, SAMPLES, MetricsLog, SampleLog
from raymm.monitor.observed_run import ObservedRun
from raymm.monitor.progress import RunProgress
from raymm.monitor.throughput import TOTAL, Throughput
from raymm.monitor.training_data import TrainingData
from raymm.recovery.failure_policy import Cause
from raymm.recovery.recovery import Recovery
from raymm.recovery.run_controller import RunController, cause_of, first_line
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint, CheckpointStore
from raymm.storage.loading import restore
from raymm.storage.resuming import have_same_rows
from raymm.training.restarts import Attempted
from raymm.training.result import Result, last_step, steps_not_applied
from raymm.training.run_batches import Batches
from raymm.training.run_start import data_position
from raymm.training.stop_request import StopReason, StopRequest
from raymm.training.training_loop import StepObserver, TrainingLoop


@dataclass
class Attempt:
    """State that an attempt needs besides its processes.

    Attributes:
        changed: differences from the run that saved the checkpoint, one line per field.
        saved: called after each checkpoint except the last.
        until: number of steps at which the attempt ends; None for ``run.steps``.
        dropped: name prefixes of checkpoint tensors that are not needed any more.
        orders: :class:`raymm.training.step_orders.StepOrders` of the plan; None if steps have the
            order of the data.
    """

    folder: Path
    run: RunConfig
    model: Model
    data: Any
    training: TrainingData
    store: CheckpointStore
    checkpoint: Checkpoint | None
    device: str
    callbacks: CallbackHandler
    attempted: Attempted | None
    changed: Sequence[str]
    console: Console
    stop: StopRequest
    saved: Callable[[], None]
    controller: RunController
    features: FeatureLookup | None = None
    until: int | None = None
    dropped: tuple[str, ...] = ()
    orders: Any = None
    loop: TrainingLoop | None = None

    def take_steps(self, parallel: ParallelModel, plan: Plan) -> Result:
        """Take steps until all are taken or a stop is requested.

        Raises:
            CheckpointError: the checkpoint cannot be loaded.
            RunFailedError: a process or a node is lost.
        """
        folder = self.folder
        batches = Batches(
            self.data, self.training, parallel.sample_check(), parallel.group.places_beside,
            self.features, *(() if self.orders is None else (self.orders.ordered,)),
        )
        shuffled = self.run.eval_every is not None and self.run.eval_shuffled
        begins = self.checkpoint is None
        keep_references(
            parallel, batches.once(shuffled), folder, self.store.run,
            None if begins else partial(have_same_rows, now=self.store.run), self._say,
        )
        if self.checkpoint is not None:
            restore(parallel, self.checkpoint.folder, self.dropped)
            self._say(f"resuming from {self.checkpoint.folder}")
        metrics = self._metrics(folder, parallel.steps_taken)
        info = RunInfo(
            folder.name, folder, parallel.steps_taken, self.run.steps, self.store.run,
            {str(stage.id): stage.module for stage in plan.stages},
        )
        self._tell(info)
        self.callbacks.load_hooks(
            parallel.steps_taken, self.run.steps,
            None if self.checkpoint is None else self.checkpoint.manifest.trainer.get("hooks"),
        )
        with RunProgress(self.run.steps, parallel.steps_taken, self.console) as progress:
            throughput = Throughput(
                self.model, _processes(plan), self.device, self.run.precision, progress.line,
                self.orders and self.orders.flops,
            )
            observer = StepObserver(
                ObservedRun(
                    parallel, self.model, self.data, self.training, folder, progress.line,
                    lambda: throughput.flops, self.orders,
                ),
                plan,
            )
            samples = None
            if self.run.log_samples:
                samples = SampleLog(folder / SAMPLES, parallel.steps_taken, progress.line)
            recovery = Recovery(
                parallel, self.controller, self.run.snapshot_every, progress.line,
                self.stop.pause,
            )

            def recovered(step: int, error: RunFailedError) -> None:
                metrics.add({
                    "step": step, "recoveries": recovery.count, "recovered_after": first_line(error)
                })
                self.callbacks.restart(Restart(
                    recovery.count, cause_of(error).value, first_line(error),
                    replace(info, first_step=step),
                ))

            texts = None
            if self.run.evaluate is not None and isinstance(self.data, DataConfig):
                texts = TextEvaluation(
                    self.run.evaluate, parallel, self.data, folder, batches.heldout_places,
                    self.features,
                )
                if texts.rules.note is not None:
                    self._say(texts.rules.note)
                best = texts.best
                self.store.keep_best(lambda steps: best.write(metrics.rows, steps))
            steps = self.run.steps if self.until is None else self.until
            self.loop = TrainingLoop(
                self.run.model_copy(update={"steps": steps}), batches=batches, parallel=parallel,
                store=self.store, metrics=metrics,
                samples=samples, observer=observer, throughput=throughput,
                callbacks=self.callbacks, progress=progress, stop=self.stop, saved=self.saved,
                recovery=recovery, enter=self.controller.enter, recovered=recovered,
                texts=texts,
            )
            with DrainObserver(parallel.group.nodes, self._ask_to_leave):
                try:
                    stopped = self.loop.run(data_position(self.checkpoint))
                except RunFailedError as error:
                    if error.lost is Loss.DATA_WORKER:
                        parallel.group.look_at_nodes()
                    raise
        if stopped is not None:
            self.callbacks.stopped(stopped)
            self._say(stopped)
            return self._result(metrics, folder, {}, stopped)
        if (expected := observer.expected.line(metrics.rows)) is not None:
            self._say(expected)
        return self._result(metrics, folder, observer.write(metrics.rows))

    def _metrics(self, folder: Path, steps_taken: int) -> MetricsLog:
        metrics = MetricsLog(folder / METRICS, steps_taken, self._say)
        corrupt = () if self.checkpoint is None else self.checkpoint.corrupt
        if corrupt or self.changed:
            metrics.add({
                "step": steps_taken, "corrupt_checkpoints": list(corrupt),
                "changed": list(self.changed),
            })
        if self.attempted is not None:
            metrics.add({
                "step": steps_taken, "restarts": self.attempted.count,
                "restarted_after": f"{self.attempted.cause.value}: {self.attempted.text}",
            })
        return metrics

    def _tell(self, run: RunInfo) -> None:
        last = self.attempted
        if not self.callbacks.started:
            self.callbacks.start(run)
        elif last is not None:
            self.callbacks.restart(Restart(last.count, last.cause.value, last.text, run))

    def _ask_to_leave(self, notice: str) -> None:
        self._say(f"{notice}: finishing and saving the current step")
        self.stop.ask(StopReason(notice, cause=Cause.PREEMPTION))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _result(
        self, metrics: MetricsLog, folder: Path, files: dict[str, Path],
        stopped: str | None = None,
    ) -> Result:
        not_applied = steps_not_applied(metrics.rows)
        shown = dict[str, Path | str](files)
        if stopped is None and self.store.current is not None:
            shown["checkpoint"] = self.store.current
        for label, file in shown.items():
            self.console.print(f"{label:<14} {file}", highlight=False, soft_wrap=True)
        if stopped is None and (skipped := sum(row.get("skipped", 0) for row in metrics.rows)):
            self.console.print(f"skipped samples in total: {skipped}", highlight=False)
        if stopped is None and not_applied:
            self.console.print(
                f"steps not applied in total: {not_applied} of {self.run.steps}", highlight=False
            )
        return Result(
            metrics=last_step(metrics.rows), history=metrics.rows, checkpoint=self.store.current,
            path=folder, files=files, changed=list(self.changed),
            corrupt=() if self.checkpoint is None else self.checkpoint.corrupt,
            steps_not_applied=not_applied, stopped=stopped,
            exhausted=None if self.loop is None else self.loop.exhausted,
        )


def _processes(plan: Plan) -> dict[str, int]:
    """Return the number of processes that compute only a module, by module. Modules that share
    ranks are left out; ``"total"`` counts all processes."""
    processes = {TOTAL: plan.num_processes}
    modules_of: dict[int, set[str]] = {}
    for stage in plan.stages:
        modules_of.setdefault(stage.rank, set()).add(stage.module)
    for module in {stage.module for stage in plan.stages}:
        ranks = [rank for rank, modules in modules_of.items() if module in modules]
        if all(modules_of[rank] == {module} for rank in ranks):
            processes[module] = sum(map(plan.processes, ranks))
    return processes
