"""Creation of the sampler for ``data.batching``; planned methods first scan the sizes of all
samples."""

from __future__ import annotations

import importlib
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from raymm.data.readers import Dataset
from raymm.data.samples.config import DataConfig
from raymm.data.sampling.group_sampler import GroupSampler
from raymm.data.sampling.rebalanced_sampler import RebalancedSampler
from raymm.data.sampling.sampler import EpochSampler, State
from raymm.data.sampling.scanner import Measure, Progress, SampleScan, Units, default_cache, scan
from raymm.errors import USER_CODE_RAISES, DataError, PlanError
from raymm.scheduler.minibatch.budgets import suggest_budgets
from raymm.scheduler.minibatch.problem import SampleSizes, checked_budgets

# First step -> weight from that step on.
Schedule = Mapping[int, float]
_KEYS = {"step", "taken"}
# Part of the seed that separates the draws of sources from the order within a step.
_MIX, _ORDER = 1, 2


class WeightedSampler:
    """Deterministic, endless stream of sample indices in which each source has its share.

    A state contains the number of the step and, by source name, the number of samples taken so far.
    A run can therefore resume with another ``batch_size``, other weights, or additional sources at
    the end of the list. The samples of a step depend only on the state, the seed and these
    settings.

    Args:
        sources: (N,) source index of every sample, ascending.
        weights: weight schedule of every source. Weights that are all 0 at some step raise a
            ``DataError``.
        shuffle: True to permute the samples of a source in each of its epochs.
    """

    def __init__(
        self, names: Sequence[str], sources: np.ndarray, weights: Sequence[Schedule],
        batch_size: int, shuffle: bool = True, seed: int = 0,
    ) -> None:
        self.names, self.batch_size = tuple(names), batch_size
        self.shuffle, self.seed = shuffle, seed
        self._weights = [dict(sorted(schedule.items())) for schedule in weights]
        self._sizes = np.bincount(sources, minlength=len(self.names))
        self._starts = np.cumsum([0, *self._sizes])
        self.length = int(self._starts[-1])
        self._orders: dict[int, tuple[int, np.ndarray]] = {}  # the current epoch of each source
        for step in sorted({first for schedule in self._weights for first in schedule}):
            self._cumulated(step)

    def _cumulated(self, step: int) -> np.ndarray:
        """Return the cumulative shares of the sources at a step, (sources,) float64, ending with 1.
        """
        sums = np.cumsum([_at(schedule, step) for schedule in self._weights])
        if not sums[-1]:
            raise DataError(
                f"data.train: the weights of all sources are 0 from step {step} on; accepted: at "
                "least one weight above 0"
            )
        return sums / sums[-1]

    def batches(self, state: State | None = None) -> Iterator[tuple[list[int], State]]:
        """Yield (indices of one step, state after the step) endlessly; errors are those of
        :meth:`check`."""
        step, positions = self.check(state)
        while True:
            generator = np.random.default_rng([self.seed, _MIX, step])
            edges = self._cumulated(step) * self.batch_size + generator.random()
            counts = np.diff(np.minimum(np.floor(edges), self.batch_size), prepend=0).astype(int)
            indices = [
                self._sample(source, positions[source] + number)
                for source, count in enumerate(counts) for number in range(count)
            ]
            order = np.random.default_rng([self.seed, _ORDER, step]).permutation(len(indices))
            step, positions = step + 1, [a + int(b) for a, b in zip(positions, counts, strict=True)]
            after = {"step": step, "taken": dict(zip(self.names, positions, strict=True))}
            yield [indices[position] for position in order], after

    def check(self, state: State | None) -> tuple[int, list[int]]:
        """Return (step, samples taken from each source) of a state; None is the beginning. Raise a
        ``DataError`` if the state comes from another sampler."""
        if state is None:
            return 0, [0] * len(self.names)
        is_valid = (
            isinstance(state, Mapping) and set(state) == _KEYS and _is_count(state["step"])
            and isinstance(state["taken"], Mapping) and all(map(_is_count, state["taken"].values()))
        )
        if not is_valid:
            raise DataError(
                f"data.train has weights, but data position {state} belongs to a run without "
                "weights; resume without weights, or start a new run"
            )
        return state["step"], [state["taken"].get(name, 0) for name in self.names]

    def _sample(self, source: int, number: int) -> int:
        """Return the sample of a source at position ``number``, counted over all its epochs."""
        size = int(self._sizes[source])
        epoch, position = divmod(number, size)
        if source not in self._orders or self._orders[source][0] != epoch:
            self._orders[source] = epoch, self._order(source, epoch, size)
        return int(self._starts[source] + self._orders[source][1][position])

    def _order(self, source: int, epoch: int, size: int) -> np.ndarray:
        """Return the order of an epoch of a source. The seed contains the name of the source, so
        that adding a source does not change the order of others."""
        if not self.shuffle:
            return np.arange(size)
        key = [self.seed, zlib.crc32(self.names[source].encode()), epoch]
        return np.random.default_rng(key).permutation(size)


def _at(schedule: Schedule, step: int) -> float:
    firsts = list(schedule)
    return schedule[firsts[bisect_right(firsts, step) - 1]]


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


Sampler = EpochSampler | GroupSampler | WeightedSampler


@dataclass(frozen=True)
class ItemTokens:
    """Number of tokens that a model makes of one item of a modality.

    Attributes:
        encoder: tokens in the blocks of the encoder.
        prepended: tokens that the language model receives in addition to those of the text.
    """

    encoder: int = 1
    prepended: int = 0


def training_sampler(
    config: DataConfig,
    dataset: Dataset,
    tokens: Mapping[str, ItemTokens] | None = None,
    progress: Progress | None = None,
    measure: Measure | None = None,
) -> Sampler:
    """Create the sampler of the training data; raise a ``DataError`` if sizes cannot be planned.

    Args:
        tokens: tokens of an item by modality; by default an item counts as one unit.
        progress, measure: passed to :func:`raymm.data.scan`, which may raise further errors.
    """
    batching = config.batching
    if schedules := [source.schedule for source in config.sources("train") if source.schedule]:
        return WeightedSampler(
            dataset.names, dataset.sources, schedules, config.batch_size, config.shuffle,
            config.seed,
        )
    if batching.method == "random":
        return EpochSampler(len(dataset), config.batch_size, config.shuffle, config.seed)
    cache = batching.cache or default_cache()
    try:
        scanned = scan(dataset, config, cache=cache, progress=progress, measure=measure)
    except OSError as error:
        raise DataError(
            f"data.batching.cache: cannot keep the scan of the samples in {str(cache)!r}: {error}"
        ) from error
    sizes = sample_sizes(scanned, config, tokens or {})
    samples = config.batch_size // config.microbatches
    try:
        # Items that all have the same large number of tokens are planned in units of that number:
        # the planner considers such granularity only for small numbers.
        common = np.maximum(np.gcd.reduce(sizes.values, axis=0), 1)
        coarse = replace(sizes, values=sizes.values // common)
        options = batching.options
        if "budgets" in options:
            suggested = suggest_budgets(coarse, samples) * common
            limits = {config.planned_as.get(n, n): most for n, most in batching.budgets.items()}
            budgets = dict(zip(sizes.names, suggested.tolist(), strict=True)) | limits
            budgets = np.array(checked_budgets(sizes, list(budgets.values())))
            options["budgets"] = (budgets // common).tolist()
        sizes = coarse
        kind = GroupSampler if batching.rebalance is None else RebalancedSampler
        sampler = kind(sizes, config.microbatches, samples, batching.method, config.seed, **options)
        sampler.open()  # plans an epoch, so that errors appear at startup
    except PlanError as error:
        raise DataError(f"data.batching: {error}") from error
    return sampler


def sample_sizes(
    samples: SampleScan, config: DataConfig, tokens: Mapping[str, ItemTokens]
) -> SampleSizes:
    """Compute the units of every sample, by ``config.planned_as`` and for ``"text"``. A modality is
    measured by its function in ``data.batching.units``, by default in tokens of its encoder.
    ``"text"`` counts the tokens of the language model. Raise a ``DataError`` for a units function
    that cannot be imported or returns invalid units."""
    units: dict[str, Units] = {}
    text = samples.text_tokens.copy()
    for name, counts in samples.counts.items():
        per_item = tokens.get(name, ItemTokens())
        text += counts * per_item.prepended
        if name in config.batching.units:
            units[name] = _units(name, config.batching.units[name])
        elif config.processor is not None:  # the scan has counted the tower inputs of each item
            units[name] = lambda items: items[:, 0]
        else:
            units[name] = lambda items, each=per_item.encoder: np.full(len(items), each, np.int64)
    sizes = samples.sizes(units)
    columns: dict[str, np.ndarray] = {}
    for name, column in zip(samples.counts, sizes.values.T, strict=False):
        planned_as = config.planned_as[name]
        columns[planned_as] = columns.get(planned_as, 0) + column
    columns["text"] = text
    values = np.stack(list(columns.values()), axis=1)
    return replace(sizes, names=tuple(columns), values=values)


def _units(modality: str, name: str) -> Units:
    """Import a function of ``data.batching.units`` and wrap it so that its results are checked."""
    field = f"data.batching.units.{modality}"
    module, _, function = name.partition(":")
    try:
        loaded = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise DataError(
            f"{field}: cannot import {name!r} as 'package.module:function': {error}"
        ) from error

    def checked(items: np.ndarray) -> np.ndarray:
        try:
            result = np.asarray(loaded(items))
        except USER_CODE_RAISES as error:  # a user's function may raise anything
            raise DataError(f"{field}: {name!r} raised {type(error).__name__}: {error}") from error
        if result.shape != (len(items),) or result.dtype.kind not in "iu" or (result < 0).any():
            raise DataError(
                f"{field}: {name!r} must return {len(items)} integers >= 0, got {result.dtype} of "
                f"shape {result.shape}"
            )
        return result

    return checked
