"""What modules really cost: seconds by the units of a microbatch, as measured while training.

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

# Parts of a unit that measured costs are rounded to where they take the place of units.
PARTS = 64
# A module whose share of all seconds is less counts for this much of the costliest one.
LEAST_WEIGHT = 0.02


class ModuleCost(NamedTuple):
    """Seconds of a module, all its stages together, on a microbatch of ``u`` units in samples of
    ``l`` each: ``fixed + linear * u + square * sum(l**2)``; none if it has no unit."""

    fixed: float = 0.0
    linear: float = 0.0
    square: float = 0.0


class Column(NamedTuple):
    """Of a step's microbatches, what one module takes of each: all samples, or, where copies of it
    share every microbatch by samples, the consecutive share of one of them.

    Attributes:
        name: its modality.
        share: which of the shares.
        of: how many there are; 1 where microbatches are not shared.
    """

    name: str
    share: int = 0
    of: int = 1


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of the modules of a run, by modality as :class:`SampleSizes` names them.

    Attributes:
        modules: of the modalities whose module was measured.
        replicas: by modality, for a module with several: seconds of each relative to their
            mean, above 1 for a slow one.
        shared: those of ``replicas`` that share every microbatch by samples; of all others each
            microbatch goes to one.
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
        """The same with copies that are equally fast."""
        return MeasuredCosts(
            self.modules, {n: (1.0,) * len(self.replicas[n]) for n in self.shared}, self.shared
        )

    def seconds(
        self, names: Sequence[str], units: np.ndarray, squares: np.ndarray
    ) -> np.ndarray:
        """(n, M) seconds of the microbatches of one step, each on the copies it goes to.

        Args:
            names: the M modalities.
            units, squares: (n, M), see :func:`group_units`.
        """
        result = np.zeros(units.shape)
        for column, name in enumerate(names):
            cost = self.modules.get(name, ModuleCost())
            own, square = units[:, column], squares[:, column]
            all_in = cost.fixed + cost.linear * own + cost.square * square
            result[:, column] = np.where(own > 0, all_in, 0.0)
        return result * self.factors(names, len(units)).T

    def column_seconds(
        self, columns: Sequence[Column], units: np.ndarray, squares: np.ndarray
    ) -> np.ndarray:
        """As :meth:`seconds`, of columns.

        Args:
            columns: C of them.
            units, squares: (n, C), see :func:`group_units`.
        """
        factors = [
            self.replicas[name][share] if of > 1 and name in self.shared else 1.0
            for name, share, of in columns
        ]
        return self.seconds([column.name for column in columns], units, squares) * factors

    def factors(self, names: Sequence[str], slots: int) -> np.ndarray:
        """(M, slots) relative seconds of the copies that the microbatches of a step go to; 1 where
        they go to all."""
        result = np.ones((len(names), slots))
        for row, name in enumerate(names):
            if name in self.replicas and name not in self.shared:
                result[row] = np.resize(self.replicas[name], slots)
        return result

    def of_samples(self, names: Sequence[str], values: np.ndarray) -> np.ndarray:
        """(N, M) units of samples to what each adds to its microbatch's seconds."""
        of = [self.modules.get(name, ModuleCost()) for name in names]
        linear = np.array([cost.linear for cost in of])
        square = np.array([cost.square for cost in of])
        x = values.astype(np.float64)
        return x * (linear + x * square)

    def in_units(self, sizes: SampleSizes) -> tuple[SampleSizes, np.ndarray]:
        """Samples with costs in the place of units, and how much each modality weighs.

        Returns:
            Sizes whose columns have :data:`PARTS` times the totals they had, shared out by
            seconds (by units, where nothing was measured); and (M,) weights, 1 for the
            modality that takes the most seconds.
        """
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
        """Without what is known of copies of modules that now have another number of them, or
        share microbatches in another way.

        Args:
            replicas: by modality.
            shared: whose copies share every microbatch by samples.
        """
        kept = {
            name: factors for name, factors in self.replicas.items()
            if replicas.get(name, 1) == len(factors) and (name in shared) == (name in self.shared)
        }
        if kept == dict(self.replicas):
            return self
        return MeasuredCosts(self.modules, kept, self.shared & kept.keys())

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        shared = {"shared": sorted(self.shared)} if self.shared else {}
        return {
            "modules": {name: list(cost) for name, cost in self.modules.items()},
            "copies": {name: list(factors) for name, factors in self.replicas.items()},
            **shared,
        }

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredCosts:
        """Inverse of :meth:`to_dict`.

        Raises:
            PlanError: if it is none.
        """
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
    """What microbatches, or copies' shares of them, are to modules.

    Args:
        sizes: of all samples.
        groups: samples of each microbatch, at least one.
        packed: if not, samples are padded to the longest in ``sizes.padded``.
        columns: C of them; by default one for each modality.

    Returns:
        (n, C) float64 units, and the sums of the squares of every sample's units.
    """
    columns = columns or tuple(map(Column, sizes.names))
    counts = np.array([len(group) for group in groups])
    samples = np.concatenate([np.asarray(g, np.int64) for g in groups])
    starts = np.cumsum(counts) - counts
    of_name: dict[str, list[np.ndarray]] = {}
    for name in sizes.names:
        values = sizes.values[samples, sizes.column(name)].astype(np.float64)
        if not packed and name in sizes.padded:
            values = np.repeat(np.maximum.reduceat(values, starts), counts)
        # Sums of whole numbers, so differences of them are exact.
        of_name[name] = [np.concatenate([[0.0], np.cumsum(v)]) for v in (values, values**2)]
    result = np.zeros((2, len(groups), len(columns)))
    for column, (name, share, of) in enumerate(columns):
        first, last = starts + share * counts // of, starts + (share + 1) * counts // of
        for which, sums in enumerate(of_name[name]):
            result[which, :, column] = sums[last] - sums[first]
    return result[0], result[1]


def of_modules(columns: Sequence[Column], values: np.ndarray) -> dict[str, np.ndarray]:
    """By modality, of a step's microbatches or the shares of them: those of (n, C) ``values`` that
    are of its module, in one row."""
    names = dict.fromkeys(column.name for column in columns)
    return {
        name: values[:, [c.name == name for c in columns]].ravel() for name in names
    }


def efficiency(seconds: Iterable[np.ndarray]) -> float:
    """Of seconds of every module, each of its microbatches (or shares of them): their mean over
    the largest, of every module by itself, together: 1 if each module takes equally long on all
    of them."""
    rows = [row for row in seconds if row.size]
    slowest = sum(float(row.max()) for row in rows)
    return sum(float(row.mean()) for row in rows) / slowest if slowest > 0 else 1.0
