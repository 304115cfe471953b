"""The data of a run, as its steps take them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raymm.data import DataConfig, MicrobatchMeta, Skipped, StepLoader
from raymm.data.loading.builder import SampleCheck
from raymm.data.loading.feature_lookup import FeatureLookup
from raymm.monitor.training_data import TrainingData
from raymm.runtime.parallel_module import ParallelModule


@dataclass(frozen=True)
class Batch:
    """A step's data: parts and metadata per microbatch, and where the data goes on."""

    parts: Sequence[Mapping[str, Any]]
    meta: Sequence[MicrobatchMeta]
    state_after: Any
    skipped: Sequence[Skipped]
    owner: Any


class Batches:
    """The data of a run.

    Args:
        data: a :class:`DataConfig`, or batches in memory.
        training: how the training data are taken.
        check: looks whether the model can take a sample of data on disk.
        places: of the data workers: those of the training data, then those of the held-out ones.
        features: looks for features of items that were kept.

    Attributes:
        heldout_places: of the held-out data's workers.
    """

    def __init__(
        self, data: DataConfig | Sequence[Any], training: TrainingData,
        check: SampleCheck | None = None, places: Sequence[Any] = (),
        features: FeatureLookup | None = None,
    ) -> None:
        self._data, self._training, self._check = data, training, check
        self._features = features
        workers = data.num_workers if isinstance(data, DataConfig) else 0
        self._places, self.heldout_places = places[:workers], places[workers:]

    def by_source(self, losses: Mapping[int, tuple[float, int]]) -> dict[str, dict[str, Any]]:
        """What a row of the metrics has of several sources: each one's mean loss over its label
        tokens, and how many they are.

        Args:
            losses: as of :class:`raymm.runtime.parallel_module.StepOutput`.
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
        """Training data from a position on.

        Args:
            state: the position; None for the beginning.
            steps: how many there may be.
            parallel: what the batches are for.
            before: steps taken there, for errors.
        """
        if isinstance(self._data, DataConfig):
            with StepLoader(
                self._data, "train", start_state=state, steps=steps,
                sampler=self._training.sampler, dataset=self._training.dataset,
                check=self._check, places=self._places, features=self._features,
                check_cluster=parallel.group.check_cluster, steps_before=before,
            ) as loader:
                for step in loader:
                    yield Batch(
                        step.microbatches, step.meta, step.state_after, step.skipped, step.owner
                    )
            return
        start = (state or {}).get("position", 0)
        for position in range(start, start + steps):
            parts, meta = parallel.prepare(self._data[position % len(self._data)])
            yield Batch(parts, meta, {"position": position + 1}, (), None)

    @property
    def modalities(self) -> tuple[str, ...] | None:
        """Those of the held-out data; None if there are no held-out data."""
        if not isinstance(self._data, DataConfig) or not self._data.heldout:
            return None
        return tuple(self._data.modalities)

    def once(self, shuffled: bool = False) -> Iterator[StepLoader]:
        """Iterate over a pass of the training data in their order, then one of the held-out data.

        Args:
            shuffled: also over a pass of the held-out data for each modality, with its items in
                the wrong samples.
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
        """One pass over the held-out data, with some modalities' items in the wrong samples.

        Args:
            steps, shuffled, check_cluster: as of :class:`StepLoader`.
        """
        assert isinstance(self._data, DataConfig)  # batches in memory have no held-out ones
        return StepLoader(
            self._data, "heldout", steps=steps, shuffled=shuffled, check=self._check,
            places=self.heldout_places, features=self._features, check_cluster=check_cluster,
        )


def timed(batches: Iterable[Batch]) -> Iterator[tuple[Batch, float]]:
    """Batches with the seconds that each was waited for."""
    start = time.perf_counter()
    for batch in batches:
        yield batch, time.perf_counter() - start
        start = time.perf_counter()
