"""Creation of the sampler for ``data.batching``; planned methods first scan the sizes of all
samples."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from raymm.data.readers import Dataset
from raymm.data.samples.config import DataConfig
from raymm.data.sampling.group_sampler import GroupSampler
from raymm.data.sampling.rebalanced_sampler import RebalancedSampler
from raymm.data.sampling.sampler import EpochSampler
from raymm.data.sampling.scan_cache import default_cache
from raymm.data.sampling.scan_result import SampleScan, Units
from raymm.data.sampling.scanner import Measure, Progress, scan
from raymm.data.sampling.weighted_sampler import WeightedSampler
from raymm.errors import USER_CODE_RAISES, DataError, PlanError
from raymm.scheduler.minibatch.budgets import suggest_budgets
from raymm.scheduler.minibatch.problem import SampleSizes, checked_budgets

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
        coarse = replace_values(sizes, sizes.values // common)
        options = batching.options
        if "budgets" in options:
            suggested = suggest_budgets(coarse, samples) * common
            budgets = dict(zip(sizes.names, suggested.tolist(), strict=True)) | batching.budgets
            budgets = np.array(checked_budgets(sizes, list(budgets.values())))
            options["budgets"] = (budgets // common).tolist()
        sizes = coarse
        kind = GroupSampler if batching.rebalance is None else RebalancedSampler
        sampler = kind(sizes, config.microbatches, samples, batching.method, config.seed, **options)
        sampler.open()  # plans an epoch, so that errors appear at startup
    except PlanError as error:
        raise DataError(f"data.batching: {error}") from error
    return sampler


def replace_values(sizes: SampleSizes, values: np.ndarray) -> SampleSizes:
    return SampleSizes(sizes.names, values, sizes.sources, sizes.padded)


def sample_sizes(
    samples: SampleScan, config: DataConfig, tokens: Mapping[str, ItemTokens]
) -> SampleSizes:
    """Compute the units of every sample, by modality and for ``"text"``.

    A modality is measured by its function in ``data.batching.units``, by default in tokens of its
    encoder. ``"text"`` counts the tokens of the language model. Raise a ``DataError`` for a units
    function that cannot be imported or returns invalid units.
    """
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
    values = np.concatenate([sizes.values[:, :-1], text[:, None]], axis=1)
    return replace_values(sizes, values)


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
