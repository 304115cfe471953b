"""Cost of a sample: linear in its units, and quadratic where its units attend to each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.minibatch.problem import SampleSizes


@dataclass(frozen=True)
class UnitCost:
    """Cost of x units of one sample: ``linear * x + quadratic * x**2``, in any unit. Packed samples
    do not attend to each other, so the cost of a group is the sum over its samples."""

    linear: float = 1.0
    quadratic: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Costs of all modalities, in a common unit. ``modalities`` is in the order of the sizes."""

    modalities: tuple[UnitCost, ...]

    def of_units(self, values: np.ndarray) -> np.ndarray:
        """Return the (..., M) float64 costs of (..., M) units, each row as one sample."""
        if values.shape[-1] != len(self.modalities):
            raise PlanError(
                f"the cost model has {len(self.modalities)} modalities, the sizes have "
                f"{values.shape[-1]}"
            )
        x = values.astype(np.float64)
        linear = np.array([cost.linear for cost in self.modalities])
        quadratic = np.array([cost.quadratic for cost in self.modalities])
        return x * (linear + x * quadratic)


def even_costs(sizes: SampleSizes) -> CostModel:
    """Return costs with which all modalities cost the same over the whole data."""
    return CostModel(tuple(UnitCost(1.0 / total if total else 0.0) for total in sizes.totals))
