"""What modules really cost: seconds by the units of a microbatch, as measured while training.

Legend: ``n`` microbatches, ``M`` modalities, ``N`` samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raymm.scheduler.minibatch.problem import MiniBatchError, SampleSizes

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


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs of the modules of a run, by modality as :class:`SampleSizes` names them.

    Attributes:
        modules: of the modalities whose module was measured.
        replicas: by modality, for a module with several: seconds of each relative to their
            mean, above 1 for a slow one.
    """

    modules: Mapping[str, ModuleCost]
    replicas: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, cost in self.modules.items():
            if not all(0 <= value < math.inf for value in cost):  # NaN fails too
                raise MiniBatchError(
                    f"costs of {name!r} are {tuple(cost)}; they must be at least 0 and finite"
                )
        for name, factors in self.replicas.items():
            if not factors or not all(0 < value < math.inf for value in factors):
                raise MiniBatchError(
                    f"copies of {name!r} take {factors}; each must be above 0 and finite"
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

    def factors(self, names: Sequence[str], slots: int) -> np.ndarray:
        """(M, slots) relative seconds of the copies that the microbatches of a step go to."""
        result = np.ones((len(names), slots))
        for row, name in enumerate(names):
            if name in self.replicas:
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

    def for_replicas(self, replicas: Mapping[str, int]) -> MeasuredCosts:
        """Without what is known of copies of modules that now have another number of them."""
        kept = {n: f for n, f in self.replicas.items() if replicas.get(n, 1) == len(f)}
        return self if kept == dict(self.replicas) else MeasuredCosts(self.modules, kept)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "modules": {name: list(cost) for name, cost in self.modules.items()},
            "copies": {name: list(factors) for name, factors in self.replicas.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredCosts:
        """Inverse of :meth:`to_dict`.

        Raises:
            MiniBatchError: if it is none.
        """
        try:
            return cls(
                {str(n): ModuleCost(*map(float, c)) for n, c in data["modules"].items()},
                {str(n): tuple(map(float, f)) for n, f in data["copies"].items()},
            )
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise MiniBatchError(f"{data!r} are no measured costs: {error!r}") from None


def group_units(
    sizes: SampleSizes, groups: Sequence[Sequence[int]], packed: bool
) -> tuple[np.ndarray, np.ndarray]:
    """What microbatches are to every module.

    Args:
        sizes: of all samples.
        groups: samples of each microbatch, at least one.
        packed: if not, samples are padded to the longest in ``sizes.padded``.

    Returns:
        (n, M) float64 units, and the sums of the squares of every sample's units.
    """
    counts = np.array([len(group) for group in groups])
    values = sizes.values[np.concatenate([np.asarray(g, np.int64) for g in groups])]
    values = values.astype(np.float64)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    if not packed:
        for name in sizes.padded:
            column = sizes.column(name)
            longest = np.maximum.reduceat(values[:, column], starts)
            values[:, column] = np.repeat(longest, counts)
    return np.add.reduceat(values, starts), np.add.reduceat(values**2, starts)


def efficiency(seconds: np.ndarray) -> float:
    """(n, M) seconds of a step's microbatches to the mean over the largest, of every module by
    itself, together: 1 if each module takes equally long on all microbatches."""
    slowest = float(seconds.max(0).sum()) if seconds.size else 0.0
    return float(seconds.mean(0).sum()) / slowest if slowest > 0 else 1.0
