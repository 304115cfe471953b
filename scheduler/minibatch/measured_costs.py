"""Measured costs of modules: seconds by the units of a microbatch.

Legend: ``n`` microbatches, ``M`` modalities, ``N`` samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.minibatch.problem import SampleSizes

# Measured costs that replace units are rounded to this fraction (1/PARTS) of a unit.
PARTS = 64
# Least weight of a module, relative to the one with the most seconds.
LEAST_WEIGHT = 0.02


class ModuleCost(NamedTuple):
    """Seconds of a module over all its stages, for a microbatch of ``u`` units in samples of ``l``
    units each: ``fixed + linear * u + square * sum(l**2)``, or 0 without units."""

    fixed: float = 0.0
    linear: float = 0.0
    square: float = 0.0


class Column(NamedTuple):
    """Column of observations: the part of each microbatch that one module replica processes.

    Attributes:
        share: index of the replica's consecutive share of the samples.
        of: number of shares; 1 if microbatches are not split.
    """

    name: str
    share: int = 0
    of: int = 1


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of the modules of a run, by modality as in :class:`SampleSizes`.

    Attributes:
        replicas: for modules with several replicas, seconds of each relative to their mean; above 1
            for a slow one.
        shared: modules of ``replicas`` that split every microbatch by samples. For all others, each
            microbatch goes to one replica.
    """

    modules: Mapping[str, ModuleCost]
    replicas: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name, cost in self.modules.items():
            if not all(0 <= value < math.inf for value in cost):  # NaN fails too
                raise PlanError(
                    f"costs of {name!r} are {tuple(cost)}; they must be at least 0 and finite"
                )
        for name, factors in self.replicas.items():
            if not factors or not all(0 < value < math.inf for value in factors):
                raise PlanError(
                    f"replicas of {name!r} are {factors}; each must be above 0 and finite"
                )
        if not self.shared <= set(self.replicas):
            raise PlanError(
                f"shared is {sorted(self.shared)}; accepted: modules of {sorted(self.replicas)}"
            )

    @property
    def even(self) -> MeasuredCosts:
        """The same costs with equally fast replicas."""
        return MeasuredCosts(
            self.modules, {n: (1.0,) * len(self.replicas[n]) for n in self.shared}, self.shared
        )

    def seconds(
        self, names: Sequence[str], units: np.ndarray, squares: np.ndarray
    ) -> np.ndarray:
        """Return the (n, M) seconds of the microbatches of a step, on the replicas that they go to.
        ``names`` are the M modalities; ``units`` and ``squares`` are (n, M), see
        :func:`group_units`."""
        result = np.zeros(units.shape)
        for column, name in enumerate(names):
            cost = self.modules.get(name, ModuleCost())
            linear, square = units[:, column], squares[:, column]
            all_in = cost.fixed + cost.linear * linear + cost.square * square
            result[:, column] = np.where(linear > 0, all_in, 0.0)
        return result * self.factors(names, len(units)).T

    def column_seconds(
        self, columns: Sequence[Column], units: np.ndarray, squares: np.ndarray
    ) -> np.ndarray:
        """Do the same as :meth:`seconds` for columns; ``units`` and ``squares`` are (n, C)."""
        factors = [
            self.replicas[name][share] if count > 1 and name in self.shared else 1.0
            for name, share, count in columns
        ]
        return self.seconds([column.name for column in columns], units, squares) * factors

    def factors(self, names: Sequence[str], slots: int) -> np.ndarray:
        """Return the (M, slots) relative seconds of the replicas that the microbatches of a step go
        to; 1 for modules that split microbatches."""
        result = np.ones((len(names), slots))
        for row, name in enumerate(names):
            if name in self.replicas and name not in self.shared:
                result[row] = np.resize(self.replicas[name], slots)
        return result

    def of_samples(self, names: Sequence[str], values: np.ndarray) -> np.ndarray:
        """Return the (N, M) seconds that samples of (N, M) units add to their microbatch."""
        costs = [self.modules.get(name, ModuleCost()) for name in names]
        linear = np.array([cost.linear for cost in costs])
        square = np.array([cost.square for cost in costs])
        x = values.astype(np.float64)
        return x * (linear + x * square)

    def in_units(self, sizes: SampleSizes) -> tuple[SampleSizes, np.ndarray]:
        """Replace units by rounded costs. Return sizes whose columns have :data:`PARTS` times the
        previous totals, distributed by seconds (by units if nothing was measured), and (M,) weights
        of modalities, 1 for the one with the most seconds."""
        cost = self.of_samples(sizes.names, sizes.values)
        seconds = cost.sum(0)
        measured = seconds > 0
        scale = np.array(sizes.totals) / np.where(measured, seconds, 1.0)
        values = np.where(measured, cost * scale, sizes.values)
        values = np.rint(values * PARTS).astype(np.int64)
        weights = seconds / seconds.max() if measured.any() else np.ones(len(seconds))
        return (
            SampleSizes(sizes.names, values, sizes.sources, sizes.padded),
            np.maximum(weights, LEAST_WEIGHT),
        )

    def for_replicas(
        self, replicas: Mapping[str, int], shared: Collection[str] = ()
    ) -> MeasuredCosts:
        """Return the costs without the factors of modules whose number of replicas or kind of split
        (``shared``) differs from the given ones."""
        matching = {
            name: factors for name, factors in self.replicas.items()
            if replicas.get(name, 1) == len(factors) and (name in shared) == (name in self.shared)
        }
        if matching == dict(self.replicas):
            return self
        return MeasuredCosts(self.modules, matching, self.shared & matching.keys())

    def to_dict(self) -> dict[str, Any]:
        shared = {"shared": sorted(self.shared)} if self.shared else {}
        return {
            "modules": {name: list(cost) for name, cost in self.modules.items()},
            "copies": {name: list(factors) for name, factors in self.replicas.items()},
            **shared,
        }

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredCosts:
        """Return the costs of a dict made by :meth:`to_dict`; raise ``PlanError`` if it is
        invalid."""
        try:
            return cls(
                {str(n): ModuleCost(*map(float, c)) for n, c in data["modules"].items()},
                {str(n): tuple(map(float, f)) for n, f in data["copies"].items()},
                frozenset(map(str, data.get("shared", ()))),
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise PlanError(f"measured costs {data!r} cannot be read: {error!r}") from None


def group_units(
    sizes: SampleSizes, groups: Sequence[Sequence[int]], packed: bool,
    columns: Sequence[Column] = (),
) -> tuple[np.ndarray, np.ndarray]:
    """Return the units of microbatches, or of replicas' shares of them.

    Args:
        groups: samples of each microbatch; at least one microbatch.
        packed: False if samples are padded to the longest in ``sizes.padded``.
        columns: C columns; by default one for each modality.

    Returns:
        (n, C) float64 units, and the sums of the squares of every sample's units.
    """
    columns = columns or tuple(map(Column, sizes.names))
    counts = np.array([len(group) for group in groups])
    samples = np.concatenate([np.asarray(g, np.int64) for g in groups])
    starts = np.cumsum(counts) - counts
    sums_by_name: dict[str, list[np.ndarray]] = {}
    for name in sizes.names:
        values = sizes.values[samples, sizes.column(name)].astype(np.float64)
        if not packed and name in sizes.padded:
            values = np.repeat(np.maximum.reduceat(values, starts), counts)
        # The sums are whole numbers, so their differences are exact.
        sums_by_name[name] = [np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2)]
    result = np.zeros((2, len(groups), len(columns)))
    for column, (name, share, count) in enumerate(columns):
        first, last = starts + share * counts // count, starts + (share + 1) * counts // count
        for power, sums in enumerate(sums_by_name[name]):
            result[power, :, column] = sums[last] - sums[first]
    return result[0], result[1]


def of_modules(columns: Sequence[Column], values: np.ndarray) -> dict[str, np.ndarray]:
    """Return, by modality, one row with the (n, C) ``values`` of its columns."""
    names = dict.fromkeys(column.name for column in columns)
    return {
        name: values[:, [c.name == name for c in columns]].ravel() for name in names
    }


def efficiency(seconds: Iterable[np.ndarray]) -> float:
    """Return the mean over the largest seconds of each module's microbatches (or shares), both
    summed over modules; 1 is perfect balance."""
    rows = [row for row in seconds if row.size]
    slowest = sum(float(row.max()) for row in rows)
    return sum(float(row.mean()) for row in rows) / slowest if slowest > 0 else 1.0
