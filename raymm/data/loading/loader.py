"""Steps of training data, from Ray data workers or built in this process."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from raymm.actors.faults.diagnosis import cause_of
from raymm.actors.faults.failure import first_line
from raymm.actors.faults.failure_kind import constructor_kind, failure_kind
from raymm.actors.faults.fault_folder import keep
from raymm.actors.faults.heartbeats import BEAT_S, Heartbeats
from raymm.actors.faults.inquiry import (
    ANSWER_TIMEOUT_S,
    inquire,
    kill_from_outside,
    look_from_outside,
)
from raymm.actors.faults.stacks import Address, Look
from raymm.data.loading.builder import (
    BuiltStep,
    SampleCheck,
    Skipped,
    check_tools,
    most_groups,
    none_usable,
)
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.data.loading.processed import measure_of, step_builder
from raymm.data.loading.sources import open_split
from raymm.data.loading.worker import StoredStep, part_names, start_worker
from raymm.data.readers import Dataset
from raymm.data.samples.collate import MicrobatchMeta
from raymm.data.samples.config import DataConfig
from raymm.data.sampling.batching import Sampler, training_sampler
from raymm.data.sampling.sampler import EpochSampler, State, flat
from raymm.errors import DataError, FailureKind, Loss, RunFailedError, SampleError

# Steps, by data file and samples, of which a worker has died in this process.
_died: set[tuple[str, tuple[int, ...]]] = set()


@dataclass(frozen=True)
class Step:
    """One optimizer step's data.

    Attributes:
        index: from 0, counted from where the loader started.
        microbatches: from ``StepLoader``, {"text": ref, modality: ref} (``ray.get`` of a ref
            gives a dict of tensors; ``join_parts`` makes the microbatch of the parts), valid as
            long as the refs are held; from ``local_steps``, the microbatches themselves. None
            where all samples of a step of a pass were left out.
        meta: one per microbatch.
        state_after: data position to resume at after this step.
        skipped: samples left out (``on_error: skip``).
        owner: the worker that built the step.
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
    """The steps of ``StepLoader`` with the same bytes, built in this process without Ray.

    Args:
        config: of the data.
        split: ``"train"`` (endless) or ``"heldout"`` (one pass in a fixed order).
        start_state: ``Step.state_after`` to go on from; None for the beginning.
        steps: stop after so many.
        shuffled: modalities whose items are given to other samples.
        sampler: what steps of the training data consist of; as of :class:`StepLoader` if None.
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
    """Iterator over steps, loaded ahead by Ray actors (start Ray first).

    The driver only sees metadata: tensors stay in the object store (what is below Ray's 100 KB,
    mostly text, in this process's part of it). Step ``i`` is built by
    worker ``i % num_workers`` and steps come out in order, so the stream is that of
    ``local_steps`` whatever the number of workers. At most ``prefetch_steps`` steps beyond the
    last one handed out are being built or waiting. Also a context manager.

    A step of the training data of which no sample is usable (``on_error: skip``) is passed over:
    its samples are among those that the next step reports as skipped.

    Args:
        config: the data configuration.
        split: "train" (endless) or "heldout" (one pass in a fixed order; its last step may have
            fewer samples and microbatches, and one of which no sample is usable has none).
        start_state: ``Step.state_after`` to go on from; None for the beginning.
        steps: stop after so many.
        shuffled: modalities whose items are given to other samples (``shuffle_modality``), for
            the held-out loss without them.
        sampler: what steps of the training data consist of; by default
            ``training_sampler(config, dataset)``, which knows nothing of the model.
        dataset: the split's samples, if they were opened already.
        check: looks whether the model can take a sample (``StepBuilder``).
        places: where the workers go (Ray's ``scheduling_strategy``), one each; anywhere without.
        features: looks for features of items that were kept (``StepBuilder``).
        check_cluster: called every second of a wait for a step; what it raises ends the wait. Of a
            worker that was to start on a node that is lost Ray itself tells some 15 s later.
        steps_before: steps of the run that were taken before; errors count on from there.

    Raises:
        DataError: here, before any actor starts, for a missing file, malformed row, unknown
            processor or a state that does not fit; from ``next()`` for an unusable sample
            (``SampleError``), or a worker that is not started within ``worker_timeout``.
            Also from ``next()`` for a sample that ended two workers, and if no sample was usable
            among as many as the data have.
        RunFailedError: from ``next()``: a worker died, or did not load a step in that time.
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
            partial(start_worker, config, stored, shuffled, checks, place, features)
            for place, _ in zip_longest(places, range(config.num_workers))
        ]
        self._workers = [start() for start in self._start]
        # Asked for first, as one that does not answer any more cannot be asked.
        self._described = [worker.describe.remote() for worker in self._workers]
        self._places: dict[int, dict | None] = {}
        self._heartbeats = Heartbeats(config.worker_timeout)
        self._pending: deque = deque()

    def __iter__(self) -> "StepLoader":
        return self

    def __next__(self) -> Step:
        while True:
            self._fill()
            if not self._pending:
                self.close()
                raise StopIteration
            index, indices, state_after, (ref, *parts) = self._pending.popleft()
            stored = self._wait(index, indices, ref)
            if stored.meta or self._is_pass:
                break
            self._left_out.add(stored.skipped)
        number, self._taken = self._taken, self._taken + 1
        self._fill()
        return Step(
            number, self._microbatches(stored.meta, parts), stored.meta, state_after,
            self._left_out.take(stored.skipped), self._worker(index),
        )

    def close(self) -> None:
        """Let go of the workers; they end when the last ``Step`` they built is dropped."""
        # Ray may have ended before a generator that holds this: cancelling would start another.
        refs = [*self._described, *(ref for *_, (ref, *_) in self._pending)]
        for ref in refs if ray.is_initialized() else ():
            ray.cancel(ref)  # a worker that never started would wait for a place to do it
        self._pending.clear()
        self._plan = iter(())
        self._workers = []
        self._described = []

    def __enter__(self) -> "StepLoader":
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
        """Each microbatch's own parts, of the refs of all that there might have been."""
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
        who = f"data worker {number} of {self.config.num_workers}"
        step = self._before + self._taken + 1
        what = f"step {step}, samples {flat(indices)} (counted from 0) of {self.path}"
        try:
            result = self._result(number, ref)
        except GetTimeoutError as late:
            ray.cancel(ref)
            error = self._late(number, who, what, str(late))
            self._end_workers()
            raise error from None
        except RayError as error:
            if isinstance(error, RayActorError):
                self._check_cluster()
                if not error.actor_init_failed:
                    self._look_for_culprit(number, flat(indices))
            self._end_workers()
            failure = _load_failure(who, what, error)
            failure.add_note(str(error))  # Ray's account: process, node, likely causes
            raise failure from None
        if isinstance(result, DataError):
            if result.skipped is None:
                raise result
            return StoredStep([], list(result.skipped))
        return result

    def _end_workers(self) -> None:
        """End all workers: others are to have their places. Steps that they have built stay."""
        for worker in self._workers:
            ray.kill(worker, no_restart=True)

    def _look_for_culprit(self, number: int, indices: Sequence[int]) -> None:
        """Load the samples of a step one at a time, if two workers have died of the step.

        Args:
            number: of the worker.
            indices: of the samples.

        Raises:
            SampleError: names a sample of which a third worker has died.
        """
        key = (str(self.path), tuple(indices))
        if key not in _died:
            _died.add(key)
            return
        for index in indices:
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
        """What a worker has loaded; it is looked after meanwhile.

        Raises:
            RayError: it cannot load it any more.
            GetTimeoutError: why that takes too long.
        """
        patience = self.config.worker_timeout
        due = time.monotonic() + patience
        while (now := time.monotonic()) < due:
            try:
                return ray.get(ref, timeout=min(BEAT_S, due - now))
            except GetTimeoutError:
                self._check_cluster()
                if (place := self._place(number)) is None:
                    continue
            look = partial(self._look, number, place["address"])
            inquiry = inquire({number: self._workers[number]}, BEAT_S)
            if inquiry.dead:  # with its node, of which Ray knows some 15 s later
                raise inquiry.dead[number]
            late = self._heartbeats.overdue(inquiry, time.monotonic(), look)
            if late is not None:
                raise GetTimeoutError(f"in time: {late.why}")
        raise GetTimeoutError(f"within worker_timeout ({patience:g} s)")

    @staticmethod
    def _look(number: int, address: Address, _: object) -> dict[int, Look]:
        return look_from_outside({number: address})

    def _place(self, number: int, seconds: float = 0.0) -> dict | None:
        """Where a worker lives that has started; None if it has not said so by then."""
        try:
            if number not in self._places:
                place: Any = ray.get(self._described[number], timeout=seconds)
                self._places[number] = place
            return self._places[number]
        except (GetTimeoutError, RayError):
            return None

    def _late(self, number: int, who: str, what: str, why: str) -> Exception:
        """What to say of a worker that takes too long: is it stuck, or was it never started?"""
        late = f"did not load {what} {why}"
        from ray._private.state import actors

        state = actors(self._workers[number]._actor_id.hex())["State"]
        if state not in ("ALIVE", "DEAD"):
            return DataError(
                f"{who} {late}: the worker has not started; check that "
                f"{self.config.worker_cpus} CPUs (worker_cpus) are free"
            )
        place = self._place(number, ANSWER_TIMEOUT_S)
        if place is None:
            return _worker_error(f"{who} {late}: the worker has never answered")
        inquiry = inquire({number: self._workers[number]}, BEAT_S)
        looks = look_from_outside({number: place["address"]})
        kill_from_outside({number: place["address"]})  # it would not obey Ray
        look = looks.get(number, Look("out of reach", ""))
        doing = inquiry.reports.get(number) or f"does not answer; it is {look.state}"
        return _worker_error(
            f"{who} (process {place['pid']} on {place['host']}) {late}: it {doing}\n"
            f"stacks: {keep({f'data-worker-{number}.txt': look.stacks})}"
        )


class _LeftOut:
    """Samples of steps that had no usable one, until a step that has some reports them.

    Args:
        most: samples of the data.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._skipped: list[Skipped] = []

    def add(self, skipped: Sequence[Skipped]) -> None:
        """
        Raises:
            DataError: there are as many as the data have.
        """
        self._skipped += skipped
        if len(self._skipped) >= self._most:
            raise none_usable(self._skipped, "the last")

    def take(self, skipped: Sequence[Skipped]) -> list[Skipped]:
        """Return them, with those of the step that reports them."""
        taken, self._skipped = [*self._skipped, *skipped], []
        return taken


def _worker_error(text: str, kind: FailureKind | None = None) -> RunFailedError:
    return RunFailedError(text, kind, Loss.DATA_WORKER)


def _load_failure(worker: str, step: str, error: RayError) -> RunFailedError:
    """Return the error of a worker that did not load a step.

    Args:
        worker, step: in words.
        error: that Ray raised.
    """
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
