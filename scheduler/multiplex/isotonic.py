"""Isotonic regression: the nearest table that rises nowhere."""

from __future__ import annotations

import numpy as np

SWEEPS = 200
CONVERGED = 1e-12


def nearest_falling(table: np.ndarray, rows: bool = True) -> np.ndarray:
    """(D, A) the table nearest to the given one (least squares) that rises along no row, and with
    ``rows`` along no column either.

    Both at once by Dykstra's alternating projections, each the pool-adjacent-violators algorithm;
    a last running minimum takes away what rounding leaves.
    """
    result = np.array(table, dtype=float)
    if not rows:
        return np.array([_falling(row) for row in result])
    along_rows, along_columns = np.zeros_like(result), np.zeros_like(result)
    for _ in range(SWEEPS):
        before = result
        shifted = result + along_rows
        projected = np.array([_falling(row) for row in shifted])
        along_rows = shifted - projected
        shifted = projected + along_columns
        result = np.array([_falling(column) for column in shifted.T]).T
        along_columns = shifted - result
        if np.abs(result - before).max() <= CONVERGED:
            break
    return np.minimum.accumulate(np.minimum.accumulate(result, axis=0), axis=1)


def _falling(values: np.ndarray) -> np.ndarray:
    """Pool adjacent violators: (n,) the nearest values that do not rise."""
    means: list[float] = []
    counts: list[int] = []
    for value in values:
        mean, count = float(value), 1
        while means and means[-1] < mean:
            total = means.pop() * counts[-1] + mean * count
            count += counts.pop()
            mean = total / count
        means.append(mean)
        counts.append(count)
    return np.repeat(means, counts)
