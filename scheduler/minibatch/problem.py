"""Types for mini-batches of a whole epoch, planned from sample sizes alone.

A *group* is the microbatch of one data-parallel rank, a *step* is one group per rank. Groups and
steps are formed from the sizes of samples in every modality (image tiles, text tokens, audio
frames...), before anything is decoded (OmniBal §4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from raymm.errors import PlanError
from raymm.plural import plural


@dataclass(frozen=True, eq=False)
class SampleSizes:
    """Sizes of samples in every modality.

    Attributes:
        names: the modalities, e.g. ``("vision", "text")``.
        values: (N, M) int64, units of every sample: tiles, tokens, frames; 0 for none.
        sources: (N,) int64, data set of every sample, numbered from 0. Default: one data set.
        padded: modalities that mini-batches pad to their longest sample if they are not packed.
            Default: the last one.

    Raises:
        PlanError: shapes or names that do not match, negative or fractional sizes.
    """

    names: tuple[str, ...]
    values: np.ndarray
    sources: np.ndarray = cast(np.ndarray, None)  # set by __post_init__
    padded: tuple[str, ...] = cast("tuple[str, ...]", None)
    _totals: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        values = np.asarray(self.values)
        if values.ndim != 2 or values.shape[1] != len(self.names) or not self.names:
            raise PlanError(
                f"values must be (N, {len(self.names)}), one column for each of {self.names}, "
                f"got shape {values.shape}"
            )
        if len(set(self.names)) != len(self.names):
            raise PlanError(f"names must differ, got {self.names}")
        if values.dtype.kind not in "iu" and values.size:
            raise PlanError(f"values must be integers, got {values.dtype}")
        values = np.ascontiguousarray(values, dtype=np.int64)
        if values.size and values.min() < 0:
            sample, column = np.argwhere(values < 0)[0]
            raise PlanError(
                f"values must not be negative, got {values[sample, column]} for sample {sample}, "
                f"{self.names[column]}"
            )
        sources = np.zeros(len(values), np.int64) if self.sources is None else self.sources
        sources = np.ascontiguousarray(sources, dtype=np.int64)
        if sources.shape != (len(values),) or (len(sources) and sources.min() < 0):
            raise PlanError(
                f"sources must be {len(values)} numbers from 0, one per sample, got shape "
                f"{sources.shape}"
            )
        padded = (self.names[-1],) if self.padded is None else tuple(self.padded)
        if not set(padded) <= set(self.names):
            raise PlanError(f"padded must be among {self.names}, got {padded}")
        object.__setattr__(self, "names", tuple(self.names))
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "sources", sources)
        object.__setattr__(self, "padded", padded)
        object.__setattr__(self, "_totals", tuple(int(t) for t in values.sum(0)))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def totals(self) -> tuple[int, ...]:
        """Units of all samples together, per modality."""
        return self._totals

    def column(self, modality: str) -> int:
        """Return the column of a modality; raise ``PlanError`` if it is unknown."""
        if modality not in self.names:
            raise PlanError(f"modality must be one of {self.names}, got {modality!r}")
        return self.names.index(modality)


@dataclass(frozen=True, eq=False)
class MiniBatchPlan:
    """Samples of every rank in every step of an epoch.

    Attributes:
        method: name of the method that made the plan.
        ranks: number of data-parallel ranks (of the LLM).
        samples: (n,) int64, samples of all groups, group by group.
        offsets: (steps * ranks + 1,) int64; group ``step * ranks + rank`` has
            ``samples[offsets[group]:offsets[group + 1]]``.
        left_out: (m,) int64, unused samples, ascending. Empty for ``balanced``.
        packed: True if a group is one packed sequence, False if samples are padded to the longest.
        budgets: most units of a group, per modality; None for no limit.
    """

    method: str
    ranks: int
    samples: np.ndarray
    offsets: np.ndarray
    left_out: np.ndarray
    packed: bool
    budgets: tuple[int, ...] | None
    seed: int
    epoch: int

    @property
    def groups(self) -> int:
        """Number of groups, a multiple of the ranks."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        return self.groups // self.ranks

    def group(self, step: int, rank: int) -> np.ndarray:
        """Return the (k,) int64 samples of one rank in one step. They are empty only if there are
        fewer samples than groups."""
        index = step * self.ranks + rank
        return self.samples[self.offsets[index] : self.offsets[index + 1]]


def checked(sizes: SampleSizes, ranks: int) -> None:
    """Raise ``PlanError`` unless there is at least one rank, and a sample for each."""
    if ranks < 1:
        raise PlanError(f"ranks must be at least 1, got {ranks}")
    if len(sizes) < ranks:
        raise PlanError(
            f"{ranks} ranks need a sample each; there {'is' if len(sizes) == 1 else 'are'} only "
            f"{plural(len(sizes), 'sample')}"
        )


def checked_budgets(sizes: SampleSizes, budgets: Sequence[int]) -> tuple[int, ...]:
    """Return the budgets as integers; raise ``PlanError`` if they are not one per modality, below
    1, or below a sample's size."""
    if len(budgets) != len(sizes.names):
        raise PlanError(
            f"budgets must be {len(sizes.names)}, one for each of {sizes.names}, got {budgets}"
        )
    for column, (name, budget) in enumerate(zip(sizes.names, budgets, strict=True)):
        if budget < 1:
            raise PlanError(f"the budget of {name} must be at least 1, got {budget}")
        largest = int(sizes.values[:, column].max(initial=0))
        if largest > budget:
            sample = int(sizes.values[:, column].argmax())
            raise PlanError(
                f"sample {sample} has {largest} units of {name}, above the budget of {budget}: "
                f"raise the budget to at least {largest}, or cut or remove such samples"
            )
    return tuple(int(budget) for budget in budgets)


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the random generator of one epoch."""
    if seed < 0 or epoch < 0:
        raise PlanError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    return np.random.default_rng([seed, epoch])
