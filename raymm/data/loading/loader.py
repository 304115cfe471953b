"""Steps of training data, loaded by Ray data workers or built in this process."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import ray
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raymm.actors.faults.diagnosis import cause_of, first_line, keep
from raymm.actors.faults.failure_kind import constructor_kind, failure_kind
from raymm.actors.faults.inquiry import (
    ANSWER_TIMEOUT_S,
    BEAT_S,
    Heartbeats,
    inquire,
    kill_from_outside,
    look_from_outside,
)
from raymm.actors.faults.observed_actor import ObservedActor, remote_class
from raymm.actors.faults.stacks import Address, Look
from raymm.actors.faults.task_tracker import task
from raymm.actors.modules.message import SOURCES
from raymm.data.loading.builder import (
    BuiltStep,
    SampleCheck,
    Skipped,
    check_tools,
    most_groups,
    none_usable,
)
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.data.loading.object_store import ItemStack, StoredTensors
from raymm.data.loading.processed import measure_of, step_builder
from raymm.data.loading.sources import open_split
from raymm.data.readers import Dataset
from raymm.data.samples.collate import MicrobatchMeta
from raymm.data.samples.config import DataConfig
from raymm.data.sampling.batching import Sampler, training_sampler
from raymm.data.sampling.sampler import EpochSampler, State, flat
from raymm.errors import USER_CODE_RAISES, DataError, FailureKind, Loss, RunFailedError, SampleError

# Steps (data file, samples) during which a data worker of this process has died.
_died: set[tuple[str, tuple[int, ...]]] = set()


@dataclass(frozen=True)
class Step:
    """Data of one optimizer step.

    Attributes:
        index: position from 0, counted from the start of the loader.
        microbatches: from ``StepLoader``, {"text": ref, modality: ref}, valid while the refs are
            held; ``ray.get`` of a ref returns a dict of tensors, and ``join_parts`` joins the parts
            of a microbatch. From ``local_steps``, the microbatches. Empty if all samples of the
            step were left out, which only happens with held-out data.
        state_after: data position to resume from after this step.
    """

    index: int
    microbatches: list[dict]
    meta: list[MicrobatchMeta]
    state_after: State
    skipped: list[Skipped]
    owner: object = field(default=None, repr=False, compare=False)


def local_steps(
    config: DataConfig,
    split: str = "train",
    start_state: State | None = None,
    steps: int | None = None,
    shuffled: Sequence[str] = (),
    sampler: Sampler | None = None,
) -> Iterator[Step]:
    """Yield the same steps as ``StepLoader``, built in this process without Ray.

    Args:
        split: ``"train"`` (endless) or ``"heldout"`` (one pass in a fixed order).
        start_state: ``Step.state_after`` to resume from; None for the beginning.
        shuffled: modalities whose items are given to other samples.
    """
    dataset = open_split(config, split)
    builder = step_builder(config, dataset)
    left_out = _LeftOut(len(dataset))

    def built_steps() -> Iterator[Step]:
        number = 0
        for indices, state_after in _plan(config, dataset, split, start_state, sampler):
            try:
                built = builder.build(indices, shuffled)
            except DataError as error:
                if error.skipped is None:
                    raise
                if split == "train":
                    left_out.add(error.skipped)
                    continue
                built = BuiltStep([], [], list(error.skipped))
            skipped = left_out.take(built.skipped)
            yield Step(number, built.microbatches, built.meta, state_after, skipped)
            number += 1

    return islice(built_steps(), steps)


class StepLoader:
    """Iterator over steps that Ray actors load ahead. Also a context manager. Ray must be running.

    The driver only receives metadata; tensors stay in the object store (objects below 100 KB,
    mostly text, in the part of this process). Worker ``i % num_workers`` builds step ``i``, and
    steps are returned in order, so they equal those of ``local_steps`` for any number of workers.
    At most ``prefetch_steps`` steps after the last returned one are built or waiting.

    With ``on_error: skip``, a step of training data without a usable sample is omitted, and the
    next step reports its samples as skipped.

    Args:
        split: ``"train"`` (endless) or ``"heldout"`` (one pass in a fixed order; the last step may
            have fewer samples and microbatches, and a step without a usable sample has no
            microbatches).
        start_state: ``Step.state_after`` to resume from; None for the beginning.
        shuffled: modalities whose items are given to other samples (``shuffle_modality``), to
            measure the held-out loss without them.
        sampler: sampler of the training data; by default ``training_sampler(config, dataset)``,
            which does not consider the model.
        check: checks whether the model accepts a sample (``StepBuilder``).
        places: Ray ``scheduling_strategy`` of each worker; by default workers run anywhere.
        check_cluster: called every second while waiting for a step; an error that it raises ends
            the wait. Ray itself reports a lost node only about 15 s later.
        steps_before: steps that the run took earlier; step numbers in errors continue from there.

    Raises:
        DataError: from the constructor for a missing file, malformed row, unknown processor, or a
            state that does not fit. From ``next()`` for an unusable sample (``SampleError``), a
            worker that has not started within ``worker_timeout``, a sample that ended two workers,
            or as many unusable samples in a row as the data have.
        RunFailedError: from ``next()`` if a worker dies, or does not load a step within
            ``worker_timeout``.
    """

    def __init__(
        self,
        config: DataConfig,
        split: str = "train",
        *,
        start_state: State | None = None,
        steps: int | None = None,
        shuffled: Sequence[str] = (),
        sampler: Sampler | None = None,
        dataset: Dataset | None = None,
        check: SampleCheck | None = None,
        places: Sequence[Any] = (),
        features: FeatureLookup | None = None,
        check_cluster: Callable[[], None] = lambda: None,
        steps_before: int = 0,
    ):
        unknown = [name for name in shuffled if name not in config.modalities]
        if unknown:
            raise DataError(f"shuffled: {unknown} not among modalities {list(config.modalities)}")
        dataset = open_split(config, split) if dataset is None else dataset
        check_tools(config)
        self.config, self.path, self.num_samples = config, dataset.path, len(dataset)
        self.names = dataset.names
        self._is_pass = split != "train"
        self._plan = enumerate(_plan(config, dataset, split, start_state, sampler))
        self._dataset, self._left_out = dataset, _LeftOut(len(dataset))
        self._most, self._before, self._taken = steps, steps_before, 0
        stored = ray.put(dataset)
        self._names, self._check_cluster = part_names(config), check_cluster
        checks = [] if check is None else [ray.put(check)]
        self._start = [
            partial(start_worker, config, stored, shuffled, checks, worker_spec, features)
            for worker_spec, _ in zip_longest(places, range(config.num_workers))
        ]
        self._workers = [start() for start in self._start]
        # Requested in advance, because a worker that hangs can no longer answer.
        self._described = [worker.describe.remote() for worker in self._workers]
        self._places: dict[int, dict | None] = {}
        self._heartbeats = Heartbeats(config.worker_timeout)
        self._pending: deque = deque()

    def __iter__(self) -> StepLoader:
        return self

    def __next__(self) -> Step:
        while True:
            self._fill()
            if not self._pending:
                self.close()
                raise StopIteration
            index, indices, state_after, (ref, *input_refs) = self._pending.popleft()
            stored = self._wait(index, indices, ref)
            if stored.meta or self._is_pass:
                break
            self._left_out.add(stored.skipped)
        number, self._taken = self._taken, self._taken + 1
        self._fill()
        return Step(
            number, self._microbatches(stored.meta, input_refs), stored.meta, state_after,
            self._left_out.take(stored.skipped), self._worker(index),
        )

    def close(self) -> None:
        """Release the workers; they end when the last ``Step`` that they built is dropped."""
        # If Ray has already shut down, cancelling would start it again.
        refs = [*self._described, *(ref for *_, (ref, *_) in self._pending)]
        for ref in refs if ray.is_initialized() else ():
            ray.cancel(ref)  # or a worker that has not started would wait for resources
        self._pending.clear()
        self._plan = iter(())
        self._workers = []
        self._described = []

    def __enter__(self) -> StepLoader:
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def _worker(self, index: int) -> ActorHandle:
        return self._workers[index % self.config.num_workers]

    def _fill(self) -> None:
        most = self.config.prefetch_steps
        if self._most is not None:
            most = min(most, self._most - self._taken)
        room = most - len(self._pending)
        for index, (indices, state_after) in islice(self._plan, max(room, 0)):
            groups = most_groups(self.config, indices)
            load = self._worker(index).load.options(num_returns=1 + groups * len(self._names))
            self._pending.append((index, indices, state_after, load.remote(indices, groups)))

    def _microbatches(
        self, meta: Sequence[MicrobatchMeta], refs: Sequence[ray.ObjectRef]
    ) -> list[dict[str, ray.ObjectRef]]:
        """Return the parts of each microbatch, out of the refs for all possible parts."""
        width = len(self._names)
        return [
            {
                name: ref
                for name, ref in zip(
                    self._names, refs[number * width : (number + 1) * width], strict=True
                )
                if name in microbatch.shapes
            }
            for number, microbatch in enumerate(meta)
        ]

    def _wait(self, index: int, indices: Sequence, ref: ray.ObjectRef) -> StoredStep:
        number = index % self.config.num_workers
        worker_label = f"data worker {number} of {self.config.num_workers}"
        step = self._before + self._taken + 1
        load = f"step {step}, samples {flat(indices)} (counted from 0) of {self.path}"
        try:
            result = self._result(number, ref)
        except GetTimeoutError as late:
            ray.cancel(ref)
            error = self._late(number, worker_label, load, str(late))
            self._end_workers()
            raise error from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._check_cluster()
                if not error.actor_init_failed:
                    self._look_for_culprit(number, flat(indices), [
                        flat(later) for i, later, *_ in self._pending
                        if i % self.config.num_workers == number
                    ])
            self._end_workers()
            failure = _load_failure(worker_label, load, error)
            failure.add_note(str(error))  # Ray's description: process, node, likely causes
            raise failure from None
        if isinstance(result, DataError):
            if result.skipped is None:
                raise result
            return StoredStep([], list(result.skipped))
        return result

    def _end_workers(self) -> None:
        """Kill all workers to free their resources. The steps that they have built stay valid."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)

    def _look_for_culprit(
        self, number: int, indices: Sequence[int], later: Sequence[Sequence[int]]
    ) -> None:
        """Load the samples of a step one at a time if two workers have died while loading that
        step. Raise a ``SampleError`` for a sample that kills a third worker. A worker that dies
        soon after it has loaded a step takes its answer with it, so the ``later`` steps that it was
        to load are suspected as well."""
        path = str(self.path)
        suspects = [(path, tuple(step)) for step in (indices, *later)]
        suspected_before = [step for step in suspects if step in _died]
        _died.update(suspects)
        for index in [index for _, step in suspected_before for index in step]:
            worker = self._workers[number] = self._start[number]()
            self._described[number] = worker.describe.remote()
            self._places.pop(number, None)
            load: Any = worker.load.options(num_returns=1 + len(self._names))
            ref, *_ = load.remote([index], 1)
            try:
                self._result(number, ref)
            except RayActorError as error:
                self._check_cluster()
                if error.actor_init_failed:
                    return
                sample = self._dataset[index]
                raise SampleError(
                    "every data worker that loads this sample dies, even if it loads no other "
                    f"sample ({first_line(error)}). Remove the sample, or find the item that "
                    "crashes its decoder", None, None, sample.id, sample.place or None,
                ) from None
            except (RayError, GetTimeoutError):
                continue

    def _result(self, number: int, ref: ray.ObjectRef) -> Any:
        """Wait for a worker to load a step, and check its heartbeats meanwhile. Raise a
        ``RayError`` if the worker has failed, and a ``GetTimeoutError`` with the reason if it takes
        too long."""
        patience = self.config.worker_timeout
        deadline = time.monotonic() + patience
        while (now := time.monotonic()) < deadline:
            try:
                return ray.get(ref, timeout=min(BEAT_S, deadline - now))
            except GetTimeoutError:
                self._check_cluster()
                if (process := self._place(number)) is None:
                    continue
            look = partial(self._look, number, process["address"])
            inquiry = inquire({number: self._workers[number]}, BEAT_S)
            if inquiry.dead:  # lost with its node, which Ray reports about 15 s later
                raise inquiry.dead[number]
            late = self._heartbeats.overdue(inquiry, time.monotonic(), look)
            if late is not None:
                raise GetTimeoutError(f"in time: {late.why}")
        raise GetTimeoutError(f"within worker_timeout ({patience:g} s)")

    @staticmethod
    def _look(number: int, address: Address, _: object) -> dict[int, Look]:
        return look_from_outside({number: address})

    def _place(self, number: int, seconds: float = 0.0) -> dict | None:
        """Return the address of a worker; None if it has not reported one within ``seconds``."""
        try:
            if number not in self._places:
                process: Any = ray.get(self._described[number], timeout=seconds)
                self._places[number] = process
            return self._places[number]
        except (GetTimeoutError, RayError):
            return None

    def _late(self, number: int, who: str, what: str, why: str) -> Exception:
        """Return the error for a worker that takes too long: it either hangs, or has not started.
        """
        late = f"did not load {what} {why}"
        from ray._private.state import actors

        state = actors(self._workers[number]._actor_id.hex())["State"]
        if state not in ("ALIVE", "DEAD"):
            return DataError(
                f"{who} {late}: the worker has not started; check that "
                f"{self.config.worker_cpus} CPUs (worker_cpus) are free"
            )
        process = self._place(number, ANSWER_TIMEOUT_S)
        if process is None:
            return _worker_error(f"{who} {late}: the worker has never answered")
        inquiry = inquire({number: self._workers[number]}, BEAT_S)
        looks = look_from_outside({number: process["address"]})
        kill_from_outside({number: process["address"]})  # a worker that hangs does not react to Ray
        look = looks.get(number, Look("out of reach", ""))
        doing = inquiry.reports.get(number) or f"does not answer; it is {look.state}"
        return _worker_error(
            f"{who} (process {process['pid']} on {process['host']}) {late}: it {doing}\n"
            f"stacks: {keep({f'data-worker-{number}.txt': look.stacks})}"
        )


class _LeftOut:
    """Skipped samples of steps without a usable sample, until the next step reports them. ``most``
    is the number of samples in the data."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._skipped: list[Skipped] = []

    def add(self, skipped: Sequence[Skipped]) -> None:
        """Add samples; raise a ``DataError`` once there are as many as the data have."""
        self._skipped += skipped
        if len(self._skipped) >= self._most:
            raise none_usable(self._skipped, "the last")

    def take(self, skipped: Sequence[Skipped]) -> list[Skipped]:
        """Return and clear the collected samples, followed by ``skipped``."""
        collected, self._skipped = [*self._skipped, *skipped], []
        return collected


def _worker_error(text: str, kind: FailureKind | None = None) -> RunFailedError:
    return RunFailedError(text, kind, Loss.DATA_WORKER)


def _load_failure(worker: str, step: str, error: RayError) -> RunFailedError:
    """Return the error for a worker that did not load a step, from the error that Ray raised."""
    if isinstance(error, RayActorError):
        if error.actor_init_failed:
            kind = constructor_kind(str(error))
            return _worker_error(f"{worker}: {first_line(error)}; it was to load {step}", kind)
        return _worker_error(f"{worker} died while loading {step}")
    if not isinstance(error, RayTaskError):
        return _worker_error(f"{worker} failed to load {step}")
    cause = cause_of(error)
    reason = f"{type(cause).__name__}: {cause}"
    return _worker_error(f"{worker} failed to load {step}: {reason}", failure_kind(cause))


def _plan(
    config: DataConfig,
    dataset: Dataset,
    split: str,
    start_state: State | None,
    sampler: Sampler | None,
) -> Iterator[tuple[list[int] | list[list[int]], State]]:
    if split == "train":
        if sampler is None:
            sampler = training_sampler(config, dataset, measure=measure_of(config))
        sampler.check(start_state)
        return sampler.batches(start_state)
    in_order = EpochSampler(len(dataset), config.batch_size, config.shuffle, config.seed)
    in_order.check(start_state)
    return in_order.one_pass(start_state)


@dataclass(frozen=True)
class StoredStep:
    """Part of a built step that the driver receives; the tensors are further results of the call.
    """

    meta: list[MicrobatchMeta]
    skipped: list[Skipped]


def part_names(config: DataConfig) -> list[str]:
    """Return the parts that a microbatch may have, in the order in which they are returned."""
    return ["text", *(config.modalities if config.processor is None else config.towers)]


class DataWorker(ObservedActor):
    """Actor that builds steps.

    Args:
        import_path: ``sys.path`` of the driver. Ray passes only the folder of the script, but
            processor functions may be elsewhere.
        check: list with a reference to the check of ``StepBuilder``, resolved after the path is
            set.
    """

    def __init__(
        self,
        config: DataConfig,
        dataset: Dataset,
        import_path: Sequence[str],
        shuffled: Sequence[str],
        check: Sequence[ray.ObjectRef] = (),
        features: FeatureLookup | None = None,
    ):
        super().__init__("cpu")
        sys.path.extend(path for path in import_path if path and path not in sys.path)
        torch.set_num_threads(1)
        checks = ray.get(list(check))
        self._builder = step_builder(config, dataset, checks[0] if checks else None, features)
        self._shuffled = tuple(shuffled)

    def pid(self) -> int:
        return os.getpid()

    @task("loading samples")
    def load(
        self, indices: Sequence[int] | Sequence[Sequence[int]], groups: int
    ) -> tuple[StoredStep | DataError | StoredTensors | None, ...]:
        """Call ``StepBuilder.build``; the call needs ``num_returns = 1 + groups *
        len(part_names)``.

        Args:
            groups: largest possible number of microbatches (``most_groups``).

        Returns:
            The step, then the parts of each microbatch in turn, with None for missing parts. A
            permanent error is returned in place of the step, because Ray would wrap a raised error.
            Temporary errors are raised, so that another attempt may succeed.
        """
        names = part_names(self._builder.config)
        stored: list[StoredTensors | None] = [None] * (groups * len(names))
        try:
            built = self._builder.build(indices, self._shuffled, stack=ItemStack)
            for number, microbatch in enumerate(built.microbatches):
                inputs = self._builder.parts(microbatch)
                if built.sources:
                    inputs["text"][SOURCES] = torch.tensor(built.sources[number])
                for name, tensors in inputs.items():
                    stored[number * len(names) + names.index(name)] = StoredTensors(tensors)
            return StoredStep(built.meta, built.skipped), *stored
        except DataError as error:
            if failure_kind(error) is FailureKind.RESOURCE:
                raise
            error.__cause__ = error.__context__ = None  # may not be picklable
            return error, *stored
        except USER_CODE_RAISES as error:
            if failure_kind(error).passes:
                raise
            failure = DataError(f"a data worker failed: {type(error).__name__}: {error}")
            failure.add_note(traceback.format_exc())
            return failure, *stored


def start_worker(
    config: DataConfig, dataset: ray.ObjectRef, shuffled: Sequence[str],
    check: Sequence[ray.ObjectRef] = (), place: Any = None,
    features: FeatureLookup | None = None,
) -> ActorHandle:
    """Start one ``DataWorker``.

    Args:
        check: reference to the check of every batch; empty for none.
        place: Ray ``scheduling_strategy`` of reserved resources; None for anywhere.
    """
    return (
        remote_class(DataWorker)
        .options(
            num_cpus=config.worker_cpus,
            max_restarts=0,
            scheduling_strategy=place,
            # Several workers decode in parallel; more threads would compete for the same cores.
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}},
        )
        .remote(config, dataset, list(sys.path), tuple(shuffled), list(check), features)
    )
