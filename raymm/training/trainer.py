"""The trainer: a run from its start, or its last checkpoint, to its end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from raymm.actors.faults.fault_folder import faults_kept_in
from raymm.actors.optimizer.optimizer import OptimizerConfig
from raymm.actors.placement.placement import ClusterError, PlacementOptions
from raymm.actors.rank.rank_group import RankResources, check_capacity
from raymm.callbacks.callback import Callback, RunInfo
from raymm.callbacks.handler import CallbackHandler
from raymm.callbacks.named import named_callbacks
from raymm.callbacks.ray_metrics import RayMetrics
from raymm.config.sections import ConfigError, RunConfig
from raymm.data import DataConfig, check_data, open_split
from raymm.data.readers import Dataset
from raymm.draw.notebook import pictures_html
from raymm.errors import RunFailedError
from raymm.files.output import Output
from raymm.files.run_files import remove_partial
from raymm.files.run_owner import RunOwner
from raymm.layout.plan_data import plan_from_dict
from raymm.model.batch_rules import Vocabulary
from raymm.model.multimodal import MultimodalModule
from raymm.monitor.metrics import METRICS, SAMPLES, MetricsLog, SampleLog, read_metrics
from raymm.monitor.observed_run import ObservedRun
from raymm.monitor.progress import RunProgress
from raymm.monitor.rebalancing import FILE as DECISIONS
from raymm.monitor.throughput import Throughput
from raymm.monitor.training_data import TrainingData, give_examples, training_data
from raymm.planning.planned_run import plan_for_cluster
from raymm.planning.request import PlanRequest
from raymm.runtime.cluster import connected, pick_device
from raymm.runtime.drain_notices import DrainObserver
from raymm.runtime.parallel_module import ParallelModule
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint, CheckpointError, CheckpointStore, restore
from raymm.storage.resuming import compare
from raymm.storage.run_description import describe_run
from raymm.training.execution import Execution, execution_of
from raymm.training.stop_request import StopReason, StopRequest, job_stop_note
from raymm.training.training_loop import Batches, TrainingLoop, last_step, steps_not_applied


@dataclass
class Result:
    """Outcome of :meth:`Trainer.fit`, like ``ray.train.Result``.

    Attributes:
        metrics: the last step's row.
        history: all rows of ``metrics.jsonl``.
        checkpoint: folder of the last checkpoint.
        changed: what is other than in the run that the checkpoint was saved by.
        corrupt: what is wrong with checkpoints that the run could not go on from, newest first.
        path: the run's folder.
        files: what to look at, by what it is (loss curve, schedule, trace).
        steps_not_applied: of all steps in ``history``, as their loss or gradients were not finite;
            ``not_applied`` of their rows says where that began.
        stopped: of a run that was asked to stop (:attr:`Trainer.stop`, or a notice that a node
            of its ends), after which step, and what is saved; None if it has taken all its steps.
    """

    metrics: dict[str, Any]
    history: list[dict[str, Any]]
    checkpoint: Path | None
    path: Path
    files: dict[str, Path] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    corrupt: tuple[str, ...] = ()
    steps_not_applied: int = 0
    stopped: str | None = None

    def _repr_html_(self) -> str:
        last = self.metrics
        lines = [f"{self.path}: {last.get('step', 0)} steps"]
        if last.get("loss") is not None:
            lines[0] += f", loss {last['loss']:.4f}, {last['tokens_per_s']:,.0f} tokens/s"
        lines += [f"checkpoint {self.checkpoint}"] if self.checkpoint else []
        lines += [self.stopped] if self.stopped else []
        pictures = {
            name: path for name, path in self.files.items() if name in ("loss curve", "schedule")
        }
        return pictures_html("\n".join(lines), pictures)


class Trainer:
    """Trains a model on Ray.

    Args:
        model: the model's description.
        parallel: a plan, a multiplexed mapping (:func:`raymm.plan_multiplexed`), or specs to make
            a plan from; a :class:`raymm.planning.request.PlanRequest` says what raymm is to plan
            itself. By default it plans for the cluster it finds, and
            a run that goes on keeps the plan it began with.
        data: a :class:`DataConfig`, or a list of batches as
            :meth:`raymm.MultimodalParallelModule.execute` takes them, used in turn.
        run_config: how long, and what to write where.
        optimizer: AdamW, its schedule, and clipping.
        resources: what each rank reserves in Ray, or a function of the device (``"cpu"``,
            ``"cuda"``) that says so; by default one CPU, and a GPU on CUDA.
        threads: intra-op threads per rank.
        callbacks: watch the run, beside those that ``run_config`` names.
        console: where to print; None for standard output.

    Attributes:
        plan: what runs where; None until :meth:`fit` has planned.
        training: how the training data are taken; empty until then.
        stop: ends :meth:`fit` after the step under way, with a checkpoint, if it is asked to, from
            any thread.

    Raises:
        ConfigError: without ``data`` or ``run_config``, or with a schedule that is over before the
            run is.
    """

    def __init__(
        self,
        model: MultimodalModule,
        parallel: Plan | StageMapping | MultimodalParallelSpec | PlanRequest | None = None,
        data: DataConfig | Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
        resources: RankResources | Callable[[str], RankResources] | None = None,
        threads: int = 1,
        callbacks: Sequence[Callback] = (),
        console: Console | None = None,
    ) -> None:
        if data is None:
            raise ConfigError("data is None; a trainer needs it")
        if run_config is None:
            raise ConfigError("run_config is None; a trainer needs it")
        self.model = model
        self.request = parallel if isinstance(parallel, PlanRequest) else PlanRequest()
        self.request.check(model)
        self.plan: Plan | StageMapping | None = None
        if isinstance(parallel, Plan | StageMapping):
            self.plan = parallel
        elif isinstance(parallel, MultimodalParallelSpec):
            self.plan = parallel.plan(model)
        self.data = _with_vocabulary(data, model)
        self.run = run_config
        self.optimizer = optimizer or OptimizerConfig()
        _check_schedule(self.optimizer, run_config.steps)
        self.resources = resources
        self.threads = threads
        self.callbacks = (RayMetrics(), *named_callbacks(run_config.callbacks), *callbacks)
        self.console = console or Console()
        self.path = Path(run_config.storage_path).absolute()
        self.training = TrainingData()
        self.stop = StopRequest()
        self._loop: TrainingLoop | None = None
        self._changed: list[str] = []

    def fit(self) -> Result:
        """Train until ``run.steps`` steps are taken in all; goes on from the run's last
        checkpoint, if there is one.

        In the main thread SIGTERM and SIGINT end it after the step under way, with a checkpoint;
        a second one, or one before the first step, at once. What is saved is printed. A notice that
        a node of the run is about to end (spot instances, ``kubectl drain``) ends it in the same
        way, and ``stopped`` of the result says so.

        Raises:
            ConfigError, DataError, CheckpointError, ClusterError, ProbeError: before any rank
                starts.
            DataError: later, for a sample that cannot be used.
            RunOwnedError: another run owns the folder and lives.
            RunFailedError: if a rank, a data worker or the cluster dies; the last checkpoint is
                whole.
            RunFileError, OwnerLostError: the folder cannot be written, or is another run's by now.
            NotFiniteError: if ``run.max_skipped_steps`` steps in a row are not finite, or a
                parameter is not.
            RunInterruptedError (a KeyboardInterrupt), RunTerminatedError (a SystemExit with code
                143): a signal ended it.
        """
        try:
            with self.stop.listening():
                result = self._fit_or_stop()
            reason = self.stop.reason
            if result.stopped and reason is not None and reason.number is not None:
                raise self.stop.error(result.stopped)
            return result
        finally:
            self.stop, self._loop = StopRequest(), None

    def _fit_or_stop(self) -> Result:
        try:
            return self._own_and_fit()
        except SystemExit as end:  # what ray.init(), while it runs, makes of SIGTERM
            if end.code != signal.SIGTERM:
                raise
            self.stop.ask(StopReason("SIGTERM", signal.SIGTERM))
        except KeyboardInterrupt:
            if self.stop.reason is None:
                raise
        except RunFailedError as error:
            error.add_note(self._what_is_left())
            raise
        text = self._stopped_at_once()
        self._say(text)
        raise self.stop.error(text)

    def _stopped_at_once(self) -> str:
        """What became of a run that a signal did not let finish its step."""
        latest = CheckpointStore(self.path, self.run.keep_checkpoints).latest()
        assert self.stop.reason is not None  # it was asked
        why, loop = self.stop.reason.why, self._loop
        saved = f"the last checkpoint is {latest}" if latest else "there is no checkpoint"
        if loop is None:
            return f"stopped by {why} before the first step: nothing was trained, {saved}"
        if steps := loop.unsaved_steps:
            return f"stopped by {why} at once: {steps} steps that are not saved are lost, {saved}"
        return f"stopped by {why} at once: no step is lost, {saved}"

    def _what_is_left(self) -> str:
        """Of a run that failed."""
        latest = CheckpointStore(self.path, self.run.keep_checkpoints).latest()
        if latest is None:
            return "There is no checkpoint: the same command begins anew."
        return f"Start the same command again to go on from {latest}."

    def _own_and_fit(self) -> Result:
        if isinstance(self.data, DataConfig):
            check_data(self.data)
        self._make_folder()
        with RunOwner(self.path, self._say) as owner:
            return self._fit(CheckpointStore(self.path, self.run.keep_checkpoints, owner.check))

    def _fit(self, store: CheckpointStore) -> Result:
        for removed in (*remove_partial(self.path), *store.remove_leftovers()):
            self._say(f"removed {removed}")
        checkpoint = store.newest()
        if checkpoint is not None:
            for line in checkpoint.warnings():
                self._say(line)
        splits = self._splits()
        store.run = describe_run(self.run, self.model, self.optimizer, self.data, splits)
        self._changed = []
        if checkpoint is not None:
            self._changed = compare(
                checkpoint.folder, checkpoint.manifest, store.run, self.run.allow_changes
            )
            for line in self._changed:
                self._say(line)
            for file in (self.path / METRICS, self.path / SAMPLES, self.path / DECISIONS):
                if file.is_file():
                    read_metrics(file)  # they go on: refused now, not once ranks have started
            if checkpoint.manifest.step >= self.run.steps:
                return self._nothing_to_do(checkpoint)
        self.training = training_data(
            self.data, self.model, _data_position(checkpoint), self.console, splits.get("train")
        )
        if self.training.dataset is not None:
            give_examples(self.model, self.data, self.training.dataset)
        with faults_kept_in(self.path), connected():
            device = pick_device(self.run.device, self._resources)
            resources = self._resources(device)
            if self.plan is None:
                self.plan = self._make_plan(device, resources, checkpoint)
            execution = execution_of(self.plan)
            execution.check(self.model, self.data, device)
            check_capacity(execution.num_processes, resources, self._placement())
            execution.save(self.path)
            self._say_what_runs(execution, device)
            with execution.start(
                self.model, optimizer=self.optimizer, precision=self.run.precision,
                device=device, resources=resources, threads=self.threads, seed=self.run.seed,
                timeout_s=self.run.timeout_s, placement=self._placement(),
            ) as parallel:
                return self._run(parallel, execution, store, checkpoint, device)

    def _splits(self) -> dict[str, Dataset]:
        if not isinstance(self.data, DataConfig):
            return {}
        return {
            split: open_split(self.data, split) for split in ("train", "heldout")
            if getattr(self.data, split) is not None
        }

    def _make_plan(
        self, device: str, resources: RankResources, checkpoint: Checkpoint | None
    ) -> Plan | StageMapping:
        """Plan; a run that goes on keeps the plan of its checkpoint while it can, so that its
        numbers are those of a run without interruption."""
        if checkpoint is not None:
            execution = execution_of(plan_from_dict(checkpoint.manifest.plan))
            reason = self._cannot_keep(execution, resources)
            if reason is None:
                self._say("going on under the plan of the checkpoint")
                return execution.plan
            self._say(f"planning anew: {reason}")
        worker_cpus = sum(bundle["CPU"] for bundle in self._placement().beside)
        with self.console.status("planning"):
            planned = plan_for_cluster(
                self.request, self.model, self.data, device=device, resources=resources,
                worker_cpus=worker_cpus, dtype=self.run.precision,
            )
        for line in planned.lines:
            self._say(line)
        return planned.plan

    def _cannot_keep(self, execution: Execution, resources: RankResources) -> str | None:
        if (reason := execution.unkept(self.model, self.data)) is not None:
            return reason
        try:
            check_capacity(execution.num_processes, resources, self._placement())
        except ClusterError as error:
            return str(error)
        return None

    def _make_folder(self) -> None:
        with Output.folder("run.storage_path", self.run.storage_path).writing():
            pass

    def _resources(self, device: str) -> RankResources:
        if self.resources is None:
            return RankResources(gpus=float(device == "cuda"))
        return self.resources(device) if callable(self.resources) else self.resources

    def _placement(self) -> PlacementOptions:
        """What data workers reserve beside the ranks; those of an evaluation run beside those of
        the training data."""
        beside: tuple[dict[str, float], ...] = ()
        if isinstance(self.data, DataConfig) and self.data.worker_cpus:
            evaluates = self.run.eval_every is not None and self.data.heldout is not None
            count = self.data.num_workers * (1 + evaluates)
            beside = ({"CPU": self.data.worker_cpus},) * count
        return PlacementOptions(beside, self.run.wait_for_nodes_s, self._say)

    def _ask_to_leave(self, notice: str) -> None:
        self._say(f"{notice}: the step under way is finished and saved")
        self.stop.ask(StopReason(notice))

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _nothing_to_do(self, checkpoint: Checkpoint) -> Result:
        taken = checkpoint.manifest.step
        self._say(
            f"nothing to do: {checkpoint.folder} has taken {taken} steps, run.steps is "
            f"{self.run.steps}"
        )
        rows = MetricsLog(self.path / METRICS, taken).rows
        return Result(
            last_step(rows), rows, checkpoint.folder, self.path, changed=self._changed,
            corrupt=checkpoint.corrupt,
            steps_not_applied=steps_not_applied(rows),
        )

    def _say_what_runs(self, execution: Execution, device: str) -> None:
        first, *notes = execution.describe(device, self.data)
        first = f"{first}, {self.run.precision}; run folder {self.path}"
        for line in filter(None, (first, *notes, job_stop_note())):
            self.console.print(line, highlight=False, soft_wrap=True)

    def _run(
        self, parallel: ParallelModule, execution: Execution, store: CheckpointStore,
        checkpoint: Checkpoint | None, device: str,
    ) -> Result:
        corrupt: tuple[str, ...] = ()
        if checkpoint is not None:
            restore(parallel, checkpoint.folder)
            self._say(f"going on from {checkpoint.folder}")
            corrupt = checkpoint.corrupt
        metrics = MetricsLog(self.path / METRICS, parallel.steps_taken)
        if corrupt or self._changed:
            metrics.add({
                "step": parallel.steps_taken, "corrupt_checkpoints": list(corrupt),
                "changed": self._changed,
            })
        samples = None
        if self.run.log_samples:
            samples = SampleLog(self.path / SAMPLES, parallel.steps_taken)
        observed = RunInfo(
            self.path.name, self.path, parallel.steps_taken, self.run.steps, store.run,
            execution.modules,
        )
        with (
            RunProgress(self.run.steps, parallel.steps_taken, self.console) as progress,
            CallbackHandler(self.callbacks, observed, progress.line) as callbacks,
        ):
            observer = execution.observer(ObservedRun(
                parallel, self.model, self.data, self.training, self.path, progress.line
            ))
            batches = Batches(
                self.data, self.training, parallel.sample_check(), parallel.group.places_beside
            )
            throughput = Throughput(
                self.model, execution.processes, device, self.run.precision, progress.line
            )
            loop = TrainingLoop(
                self.run,
                batches,
                parallel,
                store,
                metrics,
                samples,
                observer,
                throughput,
                callbacks,
                progress,
                self.stop,
            )
            self._loop = loop
            with DrainObserver(parallel.group.nodes, self._ask_to_leave):
                stopped = loop.run(_data_position(checkpoint))
            if stopped is not None:
                callbacks.stopped(stopped)
        if stopped is not None:
            self._say(stopped)
            return Result(
                metrics=last_step(metrics.rows), history=metrics.rows, checkpoint=store.current,
                path=self.path, corrupt=corrupt,
                steps_not_applied=steps_not_applied(metrics.rows), stopped=stopped,
            )
        files = observer.write(metrics.rows)
        for what, file in files.items():
            self.console.print(f"{what:<14} {file}", highlight=False, soft_wrap=True)
        if skipped := sum(row.get("skipped", 0) for row in metrics.rows):
            self.console.print(f"skipped samples in all: {skipped}", highlight=False)
        if not_applied := steps_not_applied(metrics.rows):
            self.console.print(
                f"steps not applied in all: {not_applied} of {self.run.steps}", highlight=False
            )
        return Result(
            metrics=last_step(metrics.rows), history=metrics.rows,
            checkpoint=store.current, path=self.path, files=files, changed=self._changed,
            corrupt=corrupt,
            steps_not_applied=not_applied,
        )


def _check_schedule(optimizer: OptimizerConfig, steps: int) -> None:
    """
    Raises:
        ConfigError: steps that would change nothing.
    """
    if (first := optimizer.first_without_rate(steps)) is not None:
        raise ConfigError(
            f"optimizer.total_steps is {optimizer.total_steps} and run.steps {steps}: from step "
            f"{first} on the {optimizer.schedule} learning rate would be 0, and nothing would be "
            f"learnt. Accepted: total_steps of at least {steps}, or none (then it is run.steps); "
            "or min_lr_ratio above 0, at which the last steps are taken"
        )


def _with_vocabulary(data: Any, model: MultimodalModule) -> Any:
    """The data configuration, told which token ids the model has embeddings for."""
    if not isinstance(data, DataConfig) or data.vocabulary is not None:
        return data
    vocabulary = Vocabulary.of(model.language_model.source(language_model=True).skeleton())
    return data.model_copy(update={"vocabulary": vocabulary.ids})


def _data_position(checkpoint: Checkpoint | None) -> Any:
    """Where the data go on after a checkpoint; None is the beginning.

    Raises:
        CheckpointError: it was not saved by a trainer.
    """
    if checkpoint is None:
        return None
    if "data" not in checkpoint.manifest.trainer:
        raise CheckpointError(
            f"{checkpoint.folder} does not say where its data go on: no trainer has saved it"
        )
    return checkpoint.manifest.trainer["data"]
