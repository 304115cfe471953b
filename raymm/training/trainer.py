"""Trainer: runs training from the start, or from the last checkpoint, to the end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from rich.console import Console

from raymm.actors.faults.cluster_observer import StartObserver
from raymm.actors.faults.diagnosis import faults_kept_in
from raymm.actors.host.memory import CopyOptions
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.placement.placement import PlacementOptions
from raymm.actors.rank.rank_resources import RankResources, check_capacity
from raymm.callbacks.callback import Callback
from raymm.callbacks.handler import CallbackHandler, run_callbacks
from raymm.config.build import write_json
from raymm.config.sections import CacheSection, RunConfig
from raymm.costs.named_devices import device_names, precision_notes
from raymm.data import DataConfig, check_data
from raymm.data.readers import Dataset
from raymm.errors import ClusterError, ConfigError, Loss, RunFailedError
from raymm.evaluation.best_evaluation import BestEvaluation
from raymm.files.run_files import remove_partial
from raymm.layout.layout_notes import layout_notes
from raymm.layout.mapping_plan import plan_of_mapping
from raymm.model.features import CACHED_FEATURES
from raymm.model.model import Model
from raymm.model.trainable_layers import counts_text
from raymm.monitor.metrics import DECISIONS, METRICS, SAMPLES, MetricsLog, read_metrics
from raymm.monitor.training_data import TrainingData, give_examples, training_data
from raymm.packages import import_object
from raymm.planning.request import PlanRequest, whole_microbatches
from raymm.plural import plural
from raymm.recovery.failure_policy import Cause, FailurePolicy
from raymm.recovery.run_controller import RunController
from raymm.runtime.cluster import connected, pick_device
from raymm.runtime.options import resolve_precision
from raymm.runtime.parallel_model import ParallelModel
from raymm.runtime.specs import MultimodalParallelSpec
from raymm.scheduler.multiplex.mapping import Mapping as StageMapping
from raymm.scheduler.plan.plan import Plan
from raymm.storage.checkpoint import Checkpoint, CheckpointStore
from raymm.storage.resuming import compare
from raymm.storage.run_description import describe_run
from raymm.storage.run_folder import RunFolder
from raymm.training.attempt import Attempt
from raymm.training.elastic import ElasticPlans
from raymm.training.kept_features import KeptFeatures
from raymm.training.last_words import last_words
from raymm.training.phases import Phases
from raymm.training.restarts import Attempted, Restarts, what_is_left
from raymm.training.result import Result, last_step, steps_not_applied
from raymm.training.run_plan import RunPlanner, plan_lines
from raymm.training.run_start import (
    check_updates,
    data_position,
    open_splits,
    placement_beside,
    with_commits,
    with_vocabulary,
)
from raymm.training.stop_request import StopReason, StopRequest, job_stop_note
from raymm.training.training_loop import TrainingLoop
from raymm.training.under_way import UnderWay

# Feature that is imported for plans with ``step_schedules``.
STEP_ORDERS = "raymm.training.step_orders:step_orders"


class Trainer:
    """Trains a model on Ray.

    Args:
        parallel: plan, multiplexed mapping (:func:`raymm.plan_multiplexed`), specs to make a plan
            from, or a :class:`raymm.planning.request.PlanRequest` for automatic planning. Specs
            with ranges of replicas are planned for the free resources of the cluster, and again
            after a checkpoint when these change. By default raymm plans for the connected cluster,
            and a resumed run keeps its plan.
        data: :class:`DataConfig`, or a list of batches as
            :meth:`raymm.ParallelModel.execute` takes them, used in turn.
        resources: Ray resources of each rank, or a function of the device (``"cpu"``, ``"cuda"``)
            that returns them. Default: one CPU, and one GPU on CUDA.
        threads: intra-op threads per rank.
        callbacks: called in addition to those of ``run_config``.
        console: console for output; None for standard output.
        cache: settings of the feature cache; None for no cache.
        at: modules to freeze or train from given steps on, as in
            :class:`raymm.training.phases.Phases`.

    Attributes:
        plan: plan of the run; None until :meth:`fit` has made it.
        training: how the training data are taken; empty until then.
        stop: stop request. From any thread, it ends :meth:`fit` after the current step and a
            checkpoint.

    Raises:
        ConfigError: ``data`` or ``run_config`` is missing, or the learning rate schedule ends
            before the run.
    """

    def __init__(
        self,
        model: Model,
        parallel: Plan | StageMapping | MultimodalParallelSpec | PlanRequest | None = None,
        data: DataConfig | Sequence[Any] | None = None,
        run_config: RunConfig | None = None,
        *,
        optimizer: OptimizerConfig | None = None,
        resources: RankResources | Callable[[str], RankResources] | None = None,
        threads: int = 1,
        callbacks: Sequence[Callback] = (),
        console: Console | None = None,
        cache: CacheSection | None = None,
        at: Mapping[int, Mapping[str, str]] = MappingProxyType({}),
    ) -> None:
        if data is None:
            raise ConfigError("data is None; pass a DataConfig or a list of batches")
        if run_config is None:
            raise ConfigError("run_config is None; pass a RunConfig")
        if cache is not None and cache.features != "none":
            model.require(CACHED_FEATURES, "cache is given")
        model.check_run(isinstance(data, DataConfig), isinstance(parallel, Plan | StageMapping))
        self.model = model
        self.request = parallel if isinstance(parallel, PlanRequest) else PlanRequest(
            keeps_features=cache is not None and cache.features != "none"
        )
        self.request.check(model)
        self.plan: Plan | None = None
        self._elastic: ElasticPlans | None = None
        if isinstance(parallel, Plan):
            self.plan = parallel
        elif isinstance(parallel, StageMapping):
            self.plan = plan_of_mapping(model, parallel, whole_microbatches(data))
        elif isinstance(parallel, MultimodalParallelSpec):
            self.plan = None if parallel.elastic else parallel.plan(model)
            self._elastic = ElasticPlans(parallel, model) if parallel.elastic else None
        self.data = with_commits(with_vocabulary(data, model))
        self.run = run_config
        self.optimizer = optimizer or OptimizerConfig()
        check_updates(self.optimizer, run_config, model, self.plan)
        self.resources = resources
        self.threads, self.cache = threads, cache
        self.callbacks = run_callbacks(run_config.callbacks, callbacks)
        self.console = console or Console()
        self._folder = RunFolder(run_config.storage_path)
        self.path = self._folder.path
        self.training = TrainingData()
        self.stop = StopRequest()
        self._fixed_plan = self.plan
        self._phases = Phases(model, at, run_config.steps)
        self._under_way: Attempt | None = None
        self._changed: list[str] = []
        self._restarted = False

    def fit(self) -> Result:
        """Train until ``run.steps`` steps are taken in total. Resumes from the last checkpoint, if
        any.

        In the main thread, SIGTERM and SIGINT end the run after the current step and a checkpoint.
        A second signal, or a signal before the first step, ends it immediately. The run prints what
        is saved. ``run.max_seconds`` and :attr:`stop` also end it after the current step; the
        result then has ``stopped``.

        A lost process or node ends the attempt, and so does a notice that a node of the run will
        end (spot instances, ``kubectl drain``). The run then resumes from its last checkpoint with
        new processes, at most ``run.max_failures`` or ``run.max_preemptions`` times. If a run
        leaves a node and cannot resume elsewhere, the result has ``stopped``.

        Raises:
            InputError: the input is wrong. Raised before any rank starts, except for a DataError
                about an unusable sample.
            RunFailedError: a rank, a data worker or the cluster died and the run does not resume by
                itself. The last checkpoint is intact.
            RunError: code on a rank raised (RankFailedError), the folder cannot be written, or it
                belongs to another run.
            NotFiniteError: ``run.max_skipped_steps`` steps in a row are not finite, or a parameter
                is not.
            KeyboardInterrupt, SystemExit (with code 143): a signal ended the run. The text
                describes what was saved.
        """
        try:
            with self.stop.listening(), self.stop.asking_after(self.run.max_seconds):
                result = self._fit_or_stop()
            reason = self.stop.reason
            if result.stopped and reason is not None and reason.number is not None:
                raise self.stop.error(result.stopped)
            return result
        finally:
            self.stop, self._under_way, self._restarted = StopRequest(), None, False

    def _fit_or_stop(self) -> Result:
        try:
            with last_words(self._folder) as self._has_spoken:
                return self._own_and_fit()
        except SystemExit as end:  # ray.init() turns SIGTERM into SystemExit while it runs
            if end.code != signal.SIGTERM:
                raise
            self.stop.ask(StopReason("SIGTERM", signal.SIGTERM))
        except KeyboardInterrupt:
            if self.stop.reason is None:
                raise
        except RunFailedError as error:
            error.add_note(what_is_left(error, self._latest))
            raise
        return self._stopped_result(self._stopped_at_once())

    def _stopped_result(self, text: str) -> Result:
        """Return the result of a run that was stopped before its loop; raise if a signal stopped
        it."""
        self._say(text)
        if self.stop.reason is None or self.stop.reason.number is not None:
            raise self.stop.error(text)
        rows = read_metrics(file) if (file := self.path / METRICS).is_file() else []
        return Result(last_step(rows), rows, self._latest(), self.path, stopped=text)

    def _stopped_at_once(self) -> str:
        """Describe what is saved and lost after a signal interrupted a step."""
        latest = self._latest()
        assert self.stop.reason is not None  # a stop was requested
        why, loop = self.stop.reason.why, self._loop
        saved = f"the last checkpoint is {latest}" if latest else "there is no checkpoint"
        if loop is None and self._restarted:
            return f"stopped by {why} before the run resumed: {saved}"
        if loop is None:
            return f"stopped by {why} before the first step: nothing was trained, {saved}"
        if steps := loop.unsaved_steps:
            lost = f"{plural(steps, 'unsaved step')} {'is' if steps == 1 else 'are'} lost"
            return f"stopped by {why} immediately: {lost}, {saved}"
        return f"stopped by {why} immediately: no step is lost, {saved}"

    def _end_process(self, number: int | None, lost: str) -> NoReturn:
        """End this process before the first step, while its main thread waits for a lost GCS."""
        try:
            if number is not None:
                self.stop.ask(StopReason(signal.Signals(number).name, number))
                text = self._stopped_at_once()
            else:
                error = RunFailedError(lost, lost=Loss.CLUSTER)
                text = f"the run failed:\n{error}\n{what_is_left(error, self._latest)}"
            os.write(2, f"\n{text}\n".encode())
            self._has_spoken()
        finally:
            os._exit(1 if number is None else 128 + number)

    def _latest(self) -> Path | str | None:
        return CheckpointStore(self.run.storage_path).latest()

    def _own_and_fit(self) -> Result:
        if isinstance(self.data, DataConfig):
            check_data(self.data)
        if self.run.device != "auto" and self._latest() is None:
            self._choose_precision(resolve_precision("auto", self.run.device))
            check_updates(self.optimizer, self.run, self.model, self.plan)
        self._folder.check()
        with self._folder.owned(self._say) as check_owner:
            return self._fit(CheckpointStore(
                self.run.storage_path, self.run.keep_checkpoints, check_owner, self._folder.mirror
            ))

    def _fit(self, store: CheckpointStore) -> Result:
        checkpoint = self._newest(store)
        splits = open_splits(self.data)
        self._changed = []
        self._phases.enter_before(checkpoint)
        if checkpoint is not None:
            self._choose_precision(checkpoint.manifest.run.get("run.precision", "auto"))
            check_updates(self.optimizer, self.run, self.model, self.plan)
        store.describe(describe_run(self.run, self.model, self.optimizer, self.data, splits))
        if checkpoint is not None:
            self._changed = compare(
                checkpoint.folder, checkpoint.manifest, store.run, self.run.allow_changes
            )
            for line in self._changed:
                self._say(line)
            for file in (self.path / METRICS, self.path / SAMPLES, self.path / DECISIONS):
                if file.is_file():
                    read_metrics(file)  # the run appends to them; check before ranks start
            if self._ends_before(checkpoint):
                return self._nothing_to_do(checkpoint)
        self._take_data(checkpoint, splits)
        if self.training.dataset is not None:
            give_examples(self.model, self.data, self.training.dataset)
        policy = FailurePolicy(
            self.run.max_failures, self.run.max_preemptions, self.run.max_recoveries
        )
        self._controller = RunController(policy, self._step_under_way)
        restarts = Restarts(self._controller, self.stop, self._say)
        with (
            faults_kept_in(self.path), self._connected(),
            StartObserver(lambda: self._loop is None, self._end_process),
            self._elastic.asking() if self._elastic else nullcontext(),
            CallbackHandler(self.callbacks, self.path, self._say) as callbacks,
        ):
            def attempt(attempted: Attempted | None) -> Result:
                try:
                    if attempted is None:
                        result = self._attempt(store, checkpoint, callbacks, None, splits)
                    else:
                        result = self._attempt_again(store, splits, callbacks, attempted)
                    while self._phases.go_on_after(result, self._say):
                        result = self._attempt_again(store, splits, callbacks, attempted)
                    return result
                except ClusterError as error:
                    if self._elastic is None or not self._elastic.gives_way(self.plan):
                        raise
                    self._say(f"using fewer replicas, as resources were taken: {error}")
                return attempt(attempted)

            return restarts.until_done(attempt)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connect to Ray for a block, with a progress line while Ray starts."""
        with ExitStack() as stack:
            with UnderWay(self.console, "connecting to Ray"):
                stack.enter_context(connected())
            yield

    def _choose_precision(self, precision: str) -> None:
        if self.run.precision == "auto":
            self.run = self.run.model_copy(update={"precision": precision})

    def _newest(self, store: CheckpointStore) -> Checkpoint | None:
        for removed in (*remove_partial(self.path), *store.remove_leftovers()):
            self._say(f"removed {removed}")
        checkpoint = store.newest()
        if checkpoint is not None:
            for line in checkpoint.warnings():
                self._say(line)
        return checkpoint

    def _take_data(self, checkpoint: Checkpoint | None, splits: Mapping[str, Dataset]) -> None:
        self.training = training_data(
            self.data, self.model, data_position(checkpoint), self.console, splits.get("train")
        )

    def _attempt_again(
        self, store: CheckpointStore, splits: Mapping[str, Dataset], callbacks: CallbackHandler,
        attempted: Attempted | None,
    ) -> Result:
        self._under_way, self._restarted, self.plan = None, True, self._fixed_plan
        checkpoint = self._newest(store)
        if checkpoint is not None and self._ends_before(checkpoint):
            return self._nothing_to_do(checkpoint)
        self._take_data(checkpoint, splits)
        return self._attempt(store, checkpoint, callbacks, attempted, splits)

    def _attempt(
        self, store: CheckpointStore, checkpoint: Checkpoint | None, callbacks: CallbackHandler,
        attempted: Attempted | None, splits: Mapping[str, Dataset],
    ) -> Result:
        step = self._phases.enter_after(checkpoint, self._say)
        device = pick_device(self.run.device, self._resources)
        self._choose_precision(resolve_precision("auto", device))
        check_updates(self.optimizer, self.run, self.model, self.plan)
        store.describe(describe_run(self.run, self.model, self.optimizer, self.data, splits))
        resources, placement = self._resources(device), self._placement()
        resources.check_device(device)
        if self._elastic is not None:
            self.plan, placement = self._elastic.plan(resources, placement)
        self.plan = self._phases.plan(self.plan)
        if self.plan is None:
            with UnderWay(self.console, "planning") as work:
                self.plan = RunPlanner(
                    self.request, self.model, self.data, self.run.precision, self.optimizer,
                    work.line,
                ).plan(checkpoint, device, resources, placement)
        cached_features = KeptFeatures.of(
            self.cache, self.model, self.plan, self.data, f"{device} {self.run.precision}"
        )
        plan = cached_features.plan
        check_capacity(plan.num_processes, resources, placement)
        orders = None if not plan.step_schedules else import_object(STEP_ORDERS)(
            plan, self.model, self.data, self.run.compile is not None,
            self.cache is not None and self.cache.features != "none",
        )
        write_json(self.path / "plan.json", plan.to_dict())
        self._say_what_runs(plan, cached_features.lines, device)
        with cached_features.while_it_runs(), ExitStack() as started:
            with UnderWay(
                self.console, f"starting {plural(plan.num_processes, 'process', 'es')}"
            ):
                parallel = started.enter_context(ParallelModel(
                    self.model, plan, optimizer=self.optimizer, precision=self.run.precision,
                    exact_autocast=self.run.exact_autocast, kernels=self.run.kernels,
                    compile=self.run.compile, device=device, resources=resources,
                    threads=self.threads, seed=self.run.seed,
                    placement=placement, timeout_s=self.run.timeout_s,
                    nccl_timeout_s=self.run.nccl_timeout_s, features=cached_features.folders,
                    copies=CopyOptions(
                        self.run.asynchronous_checkpoints, self.run.snapshot_every is not None
                    ),
                ))
            self._folder.check_seen_by(parallel.group)
            if self._elastic is not None:
                self._elastic.started(parallel.group.held())
            self._under_way = attempt = Attempt(
                self.path, self.run, self.model, self.data, self.training, store, checkpoint,
                device, callbacks, attempted, self._changed, self.console, self.stop,
                lambda: self._look_for_room(resources), self._controller, cached_features.lookup,
                self._phases.end(step), self._phases.dropped(step), orders=orders,
            )
            return attempt.take_steps(parallel, plan)

    def _look_for_room(self, resources: RankResources) -> None:
        """Request a restart after a checkpoint if the cluster has room for more replicas."""
        if self._elastic is None or not isinstance(self.plan, Plan):
            return
        larger = self._elastic.larger(self.plan, resources, self._placement())
        if larger is not None:
            processes = plural(larger.num_processes, "process", "es")
            room = f"room for {processes} instead of {self.plan.num_processes}"
            self.stop.ask(StopReason(room, cause=Cause.RESIZE))

    @property
    def _loop(self) -> TrainingLoop | None:
        return None if self._under_way is None else self._under_way.loop

    def _step_under_way(self) -> int | None:
        return None if self._loop is None else self._loop.step_under_way

    def _resources(self, device: str) -> RankResources:
        if self.resources is None:
            return RankResources(gpus=float(device == "cuda"))
        return self.resources(device) if callable(self.resources) else self.resources

    def _placement(self) -> PlacementOptions:
        return placement_beside(self.run, self.data, self._say, self.stop.check)

    def _say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _ends_before(self, checkpoint: Checkpoint) -> bool:
        """Return True if no step follows a checkpoint."""
        step = checkpoint.manifest.step
        return step >= self.run.steps or self._exhausted(step) is not None

    def _exhausted(self, step: int) -> str | None:
        """Return why ``patience`` of ``run.evaluate`` has ended the run after a step, or None."""
        file = self.path / METRICS
        if self.run.evaluate is None or not file.is_file():
            return None
        rows = [row for row in read_metrics(file) if row["step"] <= step]
        return BestEvaluation(self.run.evaluate, self.path).exhausted(rows)

    def _nothing_to_do(self, checkpoint: Checkpoint) -> Result:
        steps_taken = checkpoint.manifest.step
        exhausted = self._exhausted(steps_taken)
        if exhausted is not None:
            self._say(
                f"nothing to do: {checkpoint.folder} has taken {plural(steps_taken, 'step')}, and "
                f"{exhausted}"
            )
        else:
            self._say(
                f"nothing to do: {checkpoint.folder} has taken {plural(steps_taken, 'step')}, "
                "run.steps is "
                f"{self.run.steps}; to train longer, raise run.steps"
            )
        rows = MetricsLog(self.path / METRICS, steps_taken).rows
        return Result(
            last_step(rows), rows, checkpoint.folder, self.path, changed=self._changed,
            corrupt=checkpoint.corrupt, steps_not_applied=steps_not_applied(rows),
            exhausted=exhausted,
        )

    def _say_what_runs(self, plan: Plan, lines: Sequence[str], device: str) -> None:
        first, *notes = [*plan_lines(plan, device), *lines]
        gpu = "".join(f" on {name}" for name in device_names(device)[:1])
        where = f"{first}, {self.run.precision}{gpu}; run folder {self._folder}"
        counts = self.model.parameter_counts()
        parameters = counts_text(counts)
        notes += layout_notes(self.model, plan, device)
        trained = [name for name, (updated, _) in counts.items() if updated]
        notes += self.optimizer.notes(self.run.steps, trained)
        notes += precision_notes(device, self.run.precision)
        for line in filter(None, (where, parameters, *notes, job_stop_note())):
            self._say(line)
