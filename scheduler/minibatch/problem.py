"""Mini-batches of a whole epoch, planned from sample sizes alone.

A *group* is what one data-parallel rank takes at once, a *step* is one group per rank. Which
samples form a group and which groups a step is decided from how large samples are in every
modality (image tiles, text tokens, audio frames...), before anything is decoded (OmniBal §4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from raymm.errors import PlanError


@dataclass(frozen=True, eq=False)
class SampleSizes:
    """How large every sample is in every modality.

    Attributes:
        names: the modalities, e.g. ``("vision", "text")``.
        values: (N, M) int64, units of every sample: tiles, tokens, frames; 0 for none.
        sources: (N,) int64, data set of every sample, numbered from 0. Default: all of one.
        padded: the modalities that a mini-batch which is not packed pads to its longest
            sample. Default: the last one.

    Raises:
        PlanError: shapes or names that do not match, negative or fractional sizes.
    """

    names: tuple[str, ...]
    values: np.ndarray
    sources: np.ndarray = cast(np.ndarray, None)  # always there once it is made
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
        """Which column a modality has.

        Raises:
            PlanError: there is no such modality.
        """
        if modality not in self.names:
            raise PlanError(f"modality must be one of {self.names}, got {modality!r}")
        return self.names.index(modality)


@dataclass(frozen=True, eq=False)
class MiniBatchPlan:
    """Which samples every rank takes in every step of an epoch.

    Attributes:
        method: what made it.
        ranks: data-parallel ranks (of the LLM).
        samples: (n,) int64, the samples of all groups, one group after the other.
        offsets: (steps * ranks + 1,) int64; group ``step * ranks + rank`` has
            ``samples[offsets[group]:offsets[group + 1]]``.
        left_out: (m,) int64, samples that no group has, ascending. Empty for ``balanced``.
        packed: whether a group is one packed sequence, or samples padded to the longest.
        budgets: units no group exceeds, per modality; None where nothing limits them.
        seed, epoch: what the random parts were drawn from.
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
        """How many groups there are, a multiple of the ranks."""
        return len(self.offsets) - 1

    @property
    def steps(self) -> int:
        """Steps of the epoch."""
        return self.groups // self.ranks

    def group(self, step: int, rank: int) -> np.ndarray:
        """(k,) int64, samples of one rank in one step. Empty only if there are fewer samples
        than groups."""
        at = step * self.ranks + rank
        return self.samples[self.offsets[at] : self.offsets[at + 1]]


def checked(sizes: SampleSizes, ranks: int) -> None:
    """Raise PlanError unless there is something to plan for at least one rank."""
    if ranks < 1:
        raise PlanError(f"ranks must be at least 1, got {ranks}")
    if len(sizes) < ranks:
        raise PlanError(
            f"{len(sizes)} samples are fewer than the {ranks} ranks, which each need one"
        )


def checked_budgets(sizes: SampleSizes, budgets: Sequence[int]) -> tuple[int, ...]:
    """The budgets as integers, if every sample fits them.

    Raises:
        PlanError: not one per modality, not above 0, or a sample is larger than its
            budget: it would have to be cut or left out, which is for the caller to decide.
    """
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
    """Random numbers of one epoch."""
    if seed < 0 or epoch < 0:
        raise PlanError(f"seed and epoch must not be negative, got {seed} and {epoch}")
    return np.random.default_rng([seed, epoch])
