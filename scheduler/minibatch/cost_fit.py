"""Fit of module costs to measured steps, with exponential forgetting.

The seconds of each module are fitted as ``fixed + linear * units + square * squares`` with
non-negative coefficients, and a factor per replica if some replicas are slower than others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import nnls

from raymm.scheduler.minibatch.measured_costs import Column, MeasuredCosts, ModuleCost

# Microbatches of a module to observe before its costs are reported.
LEAST_MICROBATCHES = 8
# Weight, relative to the known information, that favours the linear coefficient over the fixed and
# the square one where microbatches are too similar to separate them.
PREFERENCE = 1e-4
# A microbatch counts as at most this many times its expected seconds: a process that stalls for a
# moment says nothing about costs, and permanent slowness still shows up soon.
SURPRISE = 3.0
# Iterations that alternate between coefficients and factors of replicas.
ROUNDS = 20


class CostFit:
    """Costs of the modules of a run, updated step by step.

    Args:
        names: the modalities, as in :func:`raymm.scheduler.minibatch.measured_costs.group_units`.
        replicas: number of replicas of a module, by modality; 1 if missing.
        half_life: steps after which the weight of a measurement is halved.
        columns: columns of observations; by default one for each of ``names``.
    """

    def __init__(
        self, names: Sequence[str], replicas: Mapping[str, int] | None = None,
        half_life: float = 50.0, columns: Sequence[Column] = (),
    ) -> None:
        self.names = tuple(names)
        self.columns = tuple(columns) or tuple(map(Column, names))
        self._modules = {
            name: _ModuleFit((replicas or {}).get(name, 1), 0.5 ** (1.0 / half_life))
            for name in names
        }

    def observe(
        self, units: np.ndarray, squares: np.ndarray, seconds: np.ndarray
    ) -> float | None:
        """Add a step of (n, C) units, squares and seconds, by column. Return the relative error of
        the prediction for this step (sum of errors over sum of seconds), or None if too little was
        known."""
        error, total = 0.0, 0.0
        complete = True
        present = (units > 0) & (seconds > 0)
        for name, fit in self._modules.items():
            in_module = present & [column.name == name for column in self.columns]
            microbatch, column = in_module.nonzero()
            shared = np.array([c.of > 1 for c in self.columns])[column]
            share = np.array([c.share for c in self.columns])[column]
            expected = fit.observe(
                units[in_module], squares[in_module], seconds[in_module],
                np.where(shared, share, microbatch),
            )
            if expected is None:
                complete = complete and not in_module.any()
                continue
            error += float(np.abs(expected - seconds[in_module]).sum())
            total += float(seconds[in_module].sum())
        return error / total if complete and total > 0 else None

    def costs(self) -> MeasuredCosts | None:
        fits = {name: fit for name, fit in self._modules.items() if fit.ready}
        if not fits:
            return None
        replicas = {name: fit.factors for name, fit in fits.items() if len(fit.factors) > 1}
        shared = replicas.keys() & {c.name for c in self.columns if c.of > 1}
        return MeasuredCosts(
            {name: fit.cost for name, fit in fits.items()}, replicas, frozenset(shared)
        )


class _ModuleFit:
    """Least squares of one module, kept as sums per replica: products of (1, units, squares) of
    microbatches with each other and with their seconds."""

    def __init__(self, replicas: int, keep: float) -> None:
        self._keep = keep
        self._products = np.zeros((replicas, 3, 3))
        self._moments = np.zeros((replicas, 3))
        self._count = np.zeros(replicas)
        self._seen = 0
        self.cost = ModuleCost()
        self.factors = (1.0,) * replicas

    @property
    def ready(self) -> bool:
        return self._seen >= LEAST_MICROBATCHES

    def observe(
        self, units: np.ndarray, squares: np.ndarray, seconds: np.ndarray, slots: np.ndarray
    ) -> np.ndarray | None:
        """Add microbatches, and return the seconds that were expected of them, or None."""
        replicas = slots % len(self.factors)
        rows = np.stack([np.ones(len(units)), units, squares], 1)
        expected = None
        if self.ready:
            expected = rows @ np.array(self.cost) * np.array(self.factors)[replicas]
            seconds = np.where(
                expected > 0, np.minimum(seconds, SURPRISE * expected), seconds
            )
        self._products *= self._keep
        self._moments *= self._keep
        self._count *= self._keep
        np.add.at(self._products, replicas, rows[:, :, None] * rows[:, None, :])
        np.add.at(self._moments, replicas, rows * seconds[:, None])
        np.add.at(self._count, replicas, 1.0)
        self._seen += len(units)
        if self.ready:
            self._solve()
        return expected

    def _solve(self) -> None:
        factors = np.array(self.factors)
        seen = self._count > 0
        coefficients = np.zeros(3)
        for _ in range(ROUNDS if len(factors) > 1 else 1):
            coefficients = non_negative(
                np.einsum("k,kij->ij", factors**2, self._products), factors @ self._moments
            )
            explained = np.einsum("i,kij,j->k", coefficients, self._products, coefficients)
            usable = seen & (explained > 0)
            relative = np.where(
                usable, self._moments @ coefficients / np.where(usable, explained, 1.0), factors
            )
            relative = np.maximum(relative, 1e-3)
            previous, factors = factors, relative / relative.mean()
            if np.abs(factors - previous).max() < 1e-6:
                break
        self.cost = ModuleCost(*coefficients.tolist())
        self.factors = tuple(factors.tolist())


def non_negative(products: np.ndarray, moments: np.ndarray) -> np.ndarray:
    """Return the (3,) non-negative coefficients that minimise ``x @ products @ x - 2 * moments @
    x`` plus a small square of the first and the last coefficient (:data:`PREFERENCE`).

    Args:
        products: (3, 3) sums of products of (1, units, squares).
        moments: (3,) sums of their products with seconds.
    """
    diagonal = np.diag(products)
    scale = np.where(diagonal > 0, np.sqrt(np.maximum(diagonal, 1e-300)), 1.0)
    matrix = products / np.outer(scale, scale)
    matrix += np.diag(np.array([PREFERENCE, 1e-9, PREFERENCE]))
    lower = np.linalg.cholesky(matrix)
    solution, _ = nnls(lower.T, np.linalg.solve(lower, moments / scale))
    return solution / scale
