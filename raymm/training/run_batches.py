"""Training and held-out batches of a run; training batches can be replayed after a recovery."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymm.data import DataConfig, MicrobatchMeta, Skipped, StepLoader
from raymm.data.loading.builder import SampleCheck
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.monitor.training_data import TrainingData
from raymm.runtime.parallel_module import ParallelModule
from raymm.scheduler.minibatch.step_choice import StepOrder

# Maximum number of batches since the last snapshot that are kept, with their tensors in the object
# store. Older batches are loaded again.
KEPT_BATCHES = 16


@dataclass(frozen=True)
class Batch:
    """Data of one step: parts and metadata per microbatch, and the data position after the step.

    Attributes:
        choice: order of the microbatches, which they have, and schedule of the step; None for the
            order of the data and the plan's schedule.
    """

    parts: Sequence[Mapping[str, Any]]
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    skipped: Sequence[Skipped]
    owner: Any
    choice: StepOrder | None = None


class Batches:
    """Loaders of a run's data.

    Args:
        data: a :class:`DataConfig`, or batches in memory.
        check: checks whether the model accepts a sample. Not applied to batches in memory.
        places: bundles of the data workers: first for the training data, then for the held-out
            data.
        ordered: returns a training batch with its choice of order and schedule.
    """

    def __init__(
        self, data: DataConfig | Sequence[Any], training: TrainingData,
        check: SampleCheck | None = None, places: Sequence[Any] = (),
        features: FeatureLookup | None = None,
        ordered: Callable[[Batch], Batch] = lambda batch: batch,
    ) -> None:
        self._ordered = ordered
        self._data, self._training, self._check = data, training, check
        self._features = features
        workers = data.num_workers if isinstance(data, DataConfig) else 0
        self._places, self.heldout_places = places[:workers], places[workers:]

    def by_source(self, losses: Mapping[int, tuple[float, int]]) -> dict[str, dict[str, Any]]:
        """Return the metrics row entries for several data sources: mean loss over the label tokens,
        and number of label tokens, by source name.

        Args:
            losses: source number -> (mean loss, label tokens), as in
                :class:`raymm.runtime.parallel_module.StepOutput`.
        """
        if not losses or (dataset := self._training.dataset) is None:
            return {}
        names = dataset.names
        return {
            "source_losses": {names[number]: loss for number, (loss, _) in losses.items()},
            "source_label_tokens": {names[number]: n for number, (_, n) in losses.items()},
        }

    def train(
        self, state: Any, steps: int, parallel: ParallelModule, before: int = 0
    ) -> Iterator[Batch]:
        """Iterate over training data from a position.

        Args:
            state: data position; None for the beginning.
            steps: maximum number of steps.
            parallel: model that splits batches in memory into microbatches.
            before: steps taken before the first batch, for error messages.
        """
        if isinstance(self._data, DataConfig):
            with StepLoader(
                self._data, "train", start_state=state, steps=steps,
                sampler=self._training.sampler, dataset=self._training.dataset,
                check=self._check, places=self._places, features=self._features,
                check_cluster=parallel.group.check_cluster, steps_before=before,
            ) as loader:
                for step in loader:
                    yield self._ordered(Batch(
                        step.microbatches, step.meta, step.state_after, step.skipped, step.owner
                    ))
            return
        start = (state or {}).get("position", 0)
        for position in range(start, start + steps):
            inputs, meta = parallel.prepare(self._data[position % len(self._data)])
            yield self._ordered(Batch(inputs, meta, {"position": position + 1}, (), None))

    @property
    def modalities(self) -> tuple[str, ...] | None:
        """Modalities of the held-out data; None without held-out data."""
        if not isinstance(self._data, DataConfig) or not self._data.heldout:
            return None
        return tuple(self._data.modalities)

    def once(self, shuffled: bool = False) -> Iterator[StepLoader]:
        """Iterate over one pass of the training data in stored order, then one pass of the held-out
        data.

        Args:
            shuffled: also yield a pass of the held-out data per modality, with its items in the
                wrong samples.
        """
        assert isinstance(self._data, DataConfig)
        yield StepLoader(
            self._data, "heldout", dataset=self._training.dataset, check=self._check,
            places=self._places, features=self._features,
        )
        if self.modalities is not None:
            yield self.heldout(None, ())
            for name in self.modalities if shuffled else ():
                yield self.heldout(None, (name,))

    def heldout(
        self, steps: int | None, shuffled: Sequence[str],
        check_cluster: Callable[[], None] = lambda: None,
    ) -> StepLoader:
        """Return a loader for one pass over the held-out data.

        Args:
            shuffled: modalities whose items are put into the wrong samples.
            check_cluster: called while waiting for data; raises if the cluster is lost.
        """
        assert isinstance(self._data, DataConfig)  # batches in memory have no held-out data
        return StepLoader(
            self._data, "heldout", steps=steps, shuffled=shuffled, check=self._check,
            places=self.heldout_places, features=self._features, check_cluster=check_cluster,
        )


def timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Yield each batch with the seconds spent waiting for it."""
    start = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - start
        start = time.perf_counter()


class ReplayedBatches:
    """Batches of a run in order. After :meth:`rewind`, the batches since a snapshot are replayed.

    Args:
        load: loads batches from a position in the data; also called with the number of steps taken.
        position: position in the data; None for the beginning.
    """

    def __init__(
        self, load: Callable[[Any, int], Iterator[Batch]], step: int, position: Any, keep: bool
    ) -> None:
        self._load, self._step, self._position = load, step, position
        self._loader = load(position, step)
        # Batches with their step numbers: already yielded, and waiting to be yielded again.
        self._kept: deque[tuple[int, Batch]] = deque(maxlen=KEPT_BATCHES if keep else 0)
        self._again: deque[tuple[int, Batch]] = deque()

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self._again:
                _, batch = self._again.popleft()
            elif (batch := next(self._loader, None)) is None:
                return
            self._step, self._position = self._step + 1, batch.state_after
            self._kept.append((self._step, batch))
            yield batch

    def forget(self, step: int) -> None:
        """Drop batches up to a step, which will not be replayed."""
        while self._kept and self._kept[0][0] <= step:
            self._kept.popleft()

    def rewind(self, step: int, position: Any, anew: bool = False) -> None:
        """Continue after an earlier step, from ``position`` in the data. The last argument is True
        if the kept batches were lost, too, and must be loaded again."""
        replayed = [batch for batch in (*self._kept, *self._again) if batch[0] > step and not anew]
        is_replayed = not anew and (
            self._step == step or (bool(replayed) and replayed[0][0] == step + 1)
        )
        self._kept.clear()
        self._again = deque(replayed if is_replayed else ())
        self._step, self._position = step, position
        if not is_replayed:
            self.load_anew()

    def load_anew(self) -> None:
        """Replace a lost loader. Batches that are not kept are loaded by the new one."""
        step, position = self._step, self._position
        if self._again:
            step, position = self._again[-1][0], self._again[-1][1].state_after
        self.close()
        self._loader = self._load(position, step)

    def close(self) -> None:
        """Stop loading."""
        close = getattr(self._loader, "close", None)
        if close is not None:
            close()
