"""The trainer: a run from its start, or its last checkpoint, to its end."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from raymm.actors.group import ClusterError, RankResources, check_capacity
from raymm.actors.optimizer import OptimizerConfig
from raymm.balance import step_balance
from raymm.build import write_json
from raymm.checkpoint import CheckpointStore, read_manifest, restore
from raymm.cluster import connected, pick_device
from raymm.config import ConfigError, RunConfig
from raymm.data import DataConfig, MicrobatchMeta, Skipped, StepLoader, check_data
from raymm.drift_watch import DriftWatch
from raymm.metrics import MetricsLog, SampleLog
from raymm.model import MultimodalModule, module_graph
from raymm.parallel import MultimodalParallelModule, PendingStep, StepOutput
from raymm.plan_check import differences
from raymm.plan_request import PlanRequest, plan_for_cluster
from raymm.plan_view import summary
from raymm.progress import RunProgress, heldout_line, skipped_line, step_line
from raymm.rebalancing import rebalancing
from raymm.report import RunReport
from raymm.scheduler.plan import Plan
from raymm.specs import MultimodalParallelSpec
from raymm.training_data import TrainingData, training_data

# Skipped samples that a run reports one by one; all are counted.
SKIPPED_SHOWN = 20


@dataclass
class Result:
    """Outcome of :meth:`Trainer.fit`, like ``ray.train.Result``.

    Attributes:
        metrics: the last step's row.
        history: all rows of ``metrics.jsonl``.
        checkpoint: folder of the last checkpoint.
        path: the run's folder.
        files: what to look at, by what it is (loss curve, schedule, trace).
    """

    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    checkpoint: Path | None
    path: Path
    files: dict[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class _Batch:
    """A step's data: parts and metadata per microbatch, and where the data goes on."""

    parts: Sequence[Mapping[str, Any]]
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    skipped: Sequence[Skipped]
    owner: Any


class Trainer:
    """Trains a model on Ray.

    Args:
        model: the model's description.
        parallel: a plan, or specs to make one from; a :class:`raymm.plan_request.PlanRequest`
            says what raymm is to plan itself. By default it plans for the cluster it finds, and
            a run that goes on keeps the plan it began with.
        data: a :class:`DataConfig`, or a list of batches as
            :meth:`MultimodalParallelModule.execute` takes them, used in turn.
        run_config: how long, and what to write where.
        optimizer: AdamW, its schedule, and clipping.
        resources: what each rank reserves in Ray, or a function of the device (``"cpu"``,
            ``"cuda"``) that says so; by default one CPU, and a GPU on CUDA.
        threads: intra-op threads per rank.
        console: where to print; None for standard output.

    Attributes:
        plan: what runs where; None until :meth:`fit` has planned.
        training: how the training data are taken; empty until then.

    Raises:
        ConfigError: without ``data`` or ``run_config``.
    """

    def __init__(
        self,
        model: MultimodalModule,
        parallel: Plan | MultimodalParallelSpec | PlanRequest | None = None,
        data: DataConfig | Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
        resources: RankResources | Callable[[str], RankResources] | None = None,
        threads: int = 1,
        console: Console | None = None,
    ) -> None:
        for name, value in (("data", data), ("run_config", run_config)):
            if value is None:
                raise ConfigError(f"{name} is None; a trainer needs it")
        self.model = model
        self.request = parallel if isinstance(parallel, PlanRequest) else PlanRequest()
        self.request.check(model)
        self.plan: Plan | None = None
        if isinstance(parallel, Plan):
            self.plan = parallel
        elif isinstance(parallel, MultimodalParallelSpec):
            self.plan = parallel.plan(model)
        self.data = data
        self.run = run_config
        self.optimizer = optimizer or OptimizerConfig()
        self.resources = resources
        self.threads = threads
        self.console = console or Console()
        self.path = Path(run_config.storage_path).absolute()
        self.training = TrainingData()

    def fit(self) -> Result:
        """Train until ``run.steps`` steps are taken in all; goes on from the run's last
        checkpoint, if there is one.

        Raises:
            ConfigError, DataError, CheckpointError, ClusterError, ProbeError: before any rank
                starts.
            DataError: later, for a sample that cannot be used.
            RankFailedError: if a rank dies; the last checkpoint is whole.
        """
        if isinstance(self.data, DataConfig):
            check_data(self.data)
        self._make_folder()
        store = CheckpointStore(self.path, self.run.keep_checkpoints)
        if (checkpoint := store.latest()) is not None:
            taken = read_manifest(checkpoint).step
            if taken >= self.run.steps:
                return self._nothing_to_do(checkpoint, taken)
        self.training = training_data(
            self.data, self.model, _data_position(checkpoint), self.console
        )
        with connected():
            device = pick_device(self.run.device)
            resources = self._resources(device)
            if self.plan is None:
                self._make_plan(device, resources, checkpoint)
            write_json(self.path / "plan.json", self.plan.to_dict())
            check_capacity(self.plan.num_processes, resources, self._worker_cpus())
            self._say_what_runs(device)
            with MultimodalParallelModule(
                self.model, self.plan, optimizer=self.optimizer, precision=self.run.precision,
                device=device, resources=resources, threads=self.threads, seed=self.run.seed,
                timeout_s=self.run.timeout_s,
            ) as parallel:
                return self._run(parallel, store)

    def _make_plan(
        self, device: str, resources: RankResources, checkpoint: Path | None
    ) -> None:
        """Plan; a run that goes on keeps the plan of its checkpoint while it can, so that its
        numbers are those of a run without interruption."""
        say = partial(self.console.print, highlight=False, soft_wrap=True, markup=False)
        if checkpoint is not None:
            plan = Plan.from_dict(read_manifest(checkpoint).plan)
            reason = self._cannot_keep(plan, resources)
            if reason is None:
                say("going on under the plan of the checkpoint")
                self.plan = plan
                return
            say(f"planning anew: {reason}")
        with self.console.status("planning"):
            planned = plan_for_cluster(
                self.request, self.model, self.data, device=device, resources=resources,
                worker_cpus=self._worker_cpus(), dtype=self.run.precision,
            )
        for line in (*summary(planned), *(f"note: {note}" for note in planned.notes)):
            say(line)
        self.plan = planned.plan

    def _cannot_keep(self, plan: Plan, resources: RankResources) -> str | None:
        different = differences(plan.graph, module_graph(self.model))
        if different:
            return f"the checkpoint's plan is of another model: {'; '.join(different)}"
        wanted = self.data.microbatches if isinstance(self.data, DataConfig) else None
        if wanted is not None and plan.num_microbatches != wanted:
            return (
                f"the checkpoint's plan has {plan.num_microbatches} microbatches, the data "
                f"{wanted}"
            )
        try:
            check_capacity(plan.num_processes, resources, self._worker_cpus())
        except ClusterError as error:
            return str(error)
        return None

    def _make_folder(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.storage_path is {self.run.storage_path!r}; expected a folder that can be "
                f"written: {error}"
            ) from None

    def _resources(self, device: str) -> RankResources:
        if self.resources is None:
            return RankResources(gpus=float(device == "cuda"))
        return self.resources(device) if callable(self.resources) else self.resources

    def _worker_cpus(self) -> float:
        """CPUs of data workers; those of an evaluation run beside those of the training data."""
        if not isinstance(self.data, DataConfig):
            return 0.0
        evaluates = self.run.eval_every is not None and self.data.heldout is not None
        return self.data.num_workers * self.data.worker_cpus * (1 + evaluates)

    def _nothing_to_do(self, checkpoint: Path, taken: int) -> Result:
        self.console.print(
            f"nothing to do: {checkpoint} has taken {taken} steps, run.steps is "
            f"{self.run.steps}",
            highlight=False, soft_wrap=True,
        )
        rows = MetricsLog(self.path / "metrics.jsonl", taken).rows
        return Result(_last_step(rows), rows, checkpoint, self.path)

    def _say_what_runs(self, device: str) -> None:
        plan = self.plan
        more = plan.num_processes > plan.num_ranks
        self.console.print(
            f"{len(plan.stages)} stages on {plan.num_ranks} ranks "
            f"({f'{plan.num_processes} processes, ' if more else ''}{device}), "
            f"{plan.num_microbatches} microbatches per step, {self.run.precision}; "
            f"run folder {self.path}",
            highlight=False, soft_wrap=True,
        )

    def _run(self, parallel: MultimodalParallelModule, store: CheckpointStore) -> Result:
        state: Any = None
        if (checkpoint := store.latest()) is not None:
            restore(parallel, checkpoint)
            state = _data_position(checkpoint)
            self.console.print(f"going on from {checkpoint}", highlight=False, soft_wrap=True)
        metrics = MetricsLog(self.path / "metrics.jsonl", parallel.steps_taken)
        report = RunReport(self.path, self.plan)
        samples = None
        if self.run.log_samples:
            samples = SampleLog(self.path / "samples.jsonl", parallel.steps_taken)
        loop = _Loop(self, parallel, store, metrics, report, samples)
        with RunProgress(self.run.steps, parallel.steps_taken, self.console) as progress:
            loop.run(state, progress)
        files = report.write(metrics.rows)
        for what, file in files.items():
            self.console.print(f"{what:<14} {file}", highlight=False, soft_wrap=True)
        if skipped := sum(row.get("skipped", 0) for row in metrics.rows):
            self.console.print(f"skipped samples in all: {skipped}", highlight=False)
        return Result(
            metrics=_last_step(metrics.rows), history=metrics.rows,
            checkpoint=store.latest(), path=self.path, files=files,
        )

    def batches(
        self, state: Any, steps: int, parallel: MultimodalParallelModule
    ) -> Iterator[_Batch]:
        """Training data from a position on."""
        if isinstance(self.data, DataConfig):
            with StepLoader(
                self.data, "train", start_state=state, steps=steps,
                sampler=self.training.sampler, dataset=self.training.dataset,
            ) as loader:
                for step in loader:
                    yield _Batch(
                        step.microbatches, step.meta, step.state_after, step.skipped, step.owner
                    )
            return
        start = (state or {}).get("position", 0)
        for position in range(start, start + steps):
            parts, meta = parallel.prepare(self.data[position % len(self.data)])
            yield _Batch(parts, meta, {"position": position + 1}, (), None)

    def evaluate(
        self, parallel: MultimodalParallelModule, shuffled: Sequence[str] = ()
    ) -> tuple[float, list[Skipped]]:
        """Held-out loss per label token, with some modalities' items in the wrong samples; and
        the samples left out of it."""
        total, tokens = 0.0, 0
        skipped: list[Skipped] = []
        pending: deque[PendingStep] = deque()

        def read() -> None:
            nonlocal total, tokens
            output = pending.popleft().result()
            total += output.loss * output.label_tokens
            tokens += output.label_tokens

        with StepLoader(
            self.data, "heldout", steps=self.run.eval_steps, shuffled=shuffled
        ) as loader:
            for step in loader:
                skipped += step.skipped
                pending.append(
                    parallel.submit((step.microbatches, step.meta), forward_only=True, keep=step)
                )
                if len(pending) >= self.run.steps_in_flight:
                    read()
        while pending:
            read()
        return total / max(tokens, 1), skipped


def _timed(batches: Iterator[_Batch]) -> Iterator[tuple[_Batch, float]]:
    """Batches with the seconds that each was waited for."""
    start = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - start
        start = time.perf_counter()


def _data_position(checkpoint: Path | None) -> Any:
    """Where the data go on after a checkpoint; None is the beginning."""
    return None if checkpoint is None else read_manifest(checkpoint).trainer["data"]


def _last_step(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((row for row in reversed(rows) if "loss" in row), {})


class _Loop:
    """The steps of one fit: submit ahead, read results in order, evaluate, checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        parallel: MultimodalParallelModule,
        store: CheckpointStore,
        metrics: MetricsLog,
        report: RunReport,
        samples: SampleLog | None,
    ) -> None:
        self._trainer = trainer
        self._run = trainer.run
        self._parallel = parallel
        self._store = store
        self._metrics = metrics
        self._report = report
        self._samples = samples
        self._pending: deque[tuple[int, _Batch, PendingStep, float]] = deque()
        self._last_read = time.perf_counter()
        self._reported: set[str] = set()
        self._rebalancing = rebalancing(
            trainer.data, trainer.training.sampler, parallel.plan, trainer.model.packing,
            trainer.path, parallel.steps_taken, lambda text: self._progress.line(text),
        )
        self._drift = DriftWatch(
            parallel.plan, trainer.path, lambda text: self._progress.line(text)
        )

    def run(self, state: Any, progress: RunProgress) -> None:
        self._progress = progress
        first, last = self._parallel.steps_taken, self._run.steps
        if first == 0:
            self._evaluate(0)
        self._last_read = time.perf_counter()
        batches = self._trainer.batches(state, last - first, self._parallel)
        for batch, waited in _timed(batches):
            pending = self._parallel.submit(
                (batch.parts, batch.meta), update=True, keep=batch.owner
            )
            step = self._parallel.steps_taken
            self._pending.append((step, batch, pending, waited))
            if self._stops_at(step):
                self._drain(0)
                if self._is_due(step, self._run.eval_every) or step == last:
                    self._evaluate(step)
                if step % self._run.checkpoint_every == 0 or step == last:
                    self._store.save(self._parallel, {"data": batch.state_after})
                self._last_read = time.perf_counter()
            else:
                self._drain(self._run.steps_in_flight - 1)
        self._drain(0)

    def _is_due(self, step: int, every: int | None) -> bool:
        return every is not None and step % every == 0

    def _stops_at(self, step: int) -> bool:
        """Whether the pipeline must be empty after this step."""
        return (
            step == self._run.steps
            or step % self._run.checkpoint_every == 0
            or self._is_due(step, self._run.eval_every)
        )

    def _drain(self, leave: int) -> None:
        while len(self._pending) > leave:
            step, batch, pending, waited = self._pending.popleft()
            output = pending.result()
            now = time.perf_counter()
            row = self._row(step, batch, output, now - self._last_read, waited)
            self._last_read = now
            self._metrics.add(row)
            if self._samples is not None:
                self._samples.add(
                    step, [m.sample_ids for m in batch.meta], [s.id for s in batch.skipped]
                )
            program = self._parallel.program([sorted(m.items) for m in batch.meta])
            self._report.add(step, program, output.timeline)
            self._progress.advance(output.loss)
            self._report_skipped(step, batch.skipped)
            if step % self._run.log_every == 0 or step == self._run.steps:
                self._progress.line(step_line(row, self._run.steps))

    def _report_skipped(self, step: int, skipped: Sequence[Skipped]) -> None:
        """Say once why a sample is left out, not every epoch, and only of the first few."""
        for sample in skipped:
            if sample.id not in self._reported and len(self._reported) < SKIPPED_SHOWN:
                self._reported.add(sample.id)
                self._progress.line(skipped_line(step, sample))

    def _row(
        self, step: int, batch: _Batch, output: StepOutput, seconds: float, waited: float
    ) -> dict[str, Any]:
        model, training = self._trainer.model, self._trainer.training
        timeline = output.timeline
        span = timeline.makespan or 1.0
        learnt = self._rebalancing and self._rebalancing.after_step(
            step, batch.state_after, len(batch.meta), not batch.skipped, timeline
        )
        return {
            "step": step,
            "loss": output.loss,
            "label_tokens": output.label_tokens,
            "grad_norm": output.grad_norm,
            "learning_rate": output.learning_rate,
            "seconds": round(seconds, 4),
            "tokens_per_s": round(sum(m.tokens for m in batch.meta) / seconds, 1),
            "stage_busy": {
                name: round(busy / span, 4) for name, busy in timeline.stage_busy().items()
            },
            "skipped": len(batch.skipped),
            "peak_memory_bytes": list(output.peak_bytes),
            # How long the driver waited for data. Ranks were busy with the step before meanwhile,
            # if one was under way: they stood still for as long at most.
            "data_wait_s": round(waited, 4),
            "balance": step_balance(
                batch.meta, model.encoder_names, model.packing, training.tokens,
                self._parallel.plan, timeline,
            ) | (learnt or {}),
            **self._drift.after_step(step, batch.meta, timeline),
        }

    def _evaluate(self, step: int) -> None:
        data = self._trainer.data
        if self._run.eval_every is None or not isinstance(data, DataConfig) or not data.heldout:
            return
        loss, skipped = self._trainer.evaluate(self._parallel)
        self._report_skipped(step, skipped)
        row: dict[str, Any] = {
            "step": step, "heldout_loss": loss, "heldout_skipped": len(skipped)
        }
        for name in data.modalities if self._run.eval_shuffled else ():
            wrong, _ = self._trainer.evaluate(self._parallel, (name,))
            row[f"heldout_loss_shuffled_{name}"] = wrong
            row[f"heldout_gap_{name}"] = wrong - row["heldout_loss"]
        self._metrics.add(row)
        self._progress.line(heldout_line(row))


