"""Tables of papers next to figures that raymm computes, and how far they are apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table as RichTable
from scipy.stats import spearmanr


@dataclass(frozen=True)
class Row:
    """One figure of a table.

    Attributes:
        name: what the figure is of, e.g. ``"VALM-SS, colocated"``.
        raymm: figure that raymm computes; None if ``missing`` says what it needs.
        missing: quantity that the paper does not give.
    """

    name: str
    paper: float
    raymm: float | None
    missing: str = ""

    def __post_init__(self) -> None:
        if (self.raymm is None) != bool(self.missing):
            raise ValueError(f"row {self.name!r} must have either a figure or a missing quantity")

    @property
    def ratio(self) -> float | None:
        """Return raymm's figure over the paper's."""
        return None if self.raymm is None else self.raymm / self.paper


@dataclass(frozen=True)
class Table:
    """Figures of one kind from a table, a figure or a section.

    Attributes:
        name: e.g. ``"Cornstarch v1, Table 2: throughput"``.
        source: section of the paper, and its page where the text has page numbers.
        quantity: what the figures are, with their unit.
        missing: quantities that the paper does not give, and that the figures depend on.
    """

    name: str
    source: str
    quantity: str
    rows: tuple[Row, ...]
    missing: str = ""

    @property
    def compared(self) -> tuple[Row, ...]:
        """Return the rows with a figure of raymm."""
        return tuple(row for row in self.rows if row.raymm is not None)

    @property
    def differences(self) -> list[float]:
        """Return ``|raymm / paper - 1|`` of each compared row."""
        return [abs(row.ratio - 1) for row in self.compared]

    def to_dict(self) -> dict[str, Any]:
        differences = self.differences
        return {
            "name": self.name,
            "source": self.source,
            "quantity": self.quantity,
            "missing": self.missing,
            "median_difference": round(statistics.median(differences), 4) if differences else None,
            "worst_difference": round(max(differences), 4) if differences else None,
            "rank_correlation": _rounded(_rank_correlation(
                [row.paper for row in self.compared], [row.raymm for row in self.compared]
            )),
            "rows": [
                {
                    "name": row.name, "paper": row.paper, "raymm": _rounded(row.raymm),
                    "ratio": _rounded(row.ratio), "missing": row.missing,
                }
                for row in self.rows
            ],
        }

    def rich(self) -> RichTable:
        """Return the table for a terminal."""
        summary = self.to_dict()
        figures = ", ".join(
            f"{key.replace('_', ' ')} {summary[key]}"
            for key in ("median_difference", "worst_difference", "rank_correlation")
        )
        table = RichTable(title=f"{self.name} ({self.quantity})", caption=figures)
        for heading in ("row", "paper", "raymm", "ratio"):
            table.add_column(heading, justify="left" if heading == "row" else "right")
        for row in self.rows:
            if row.raymm is None:
                table.add_row(row.name, f"{row.paper:.4g}", "-", f"missing: {row.missing}")
            else:
                table.add_row(
                    row.name, f"{row.paper:.4g}", f"{row.raymm:.4g}", f"{row.ratio:.3f}"
                )
        return table


def _rank_correlation(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Return Spearman's rank correlation, with mean ranks for equal values; None for fewer than
    three pairs or a constant sequence."""
    if len(first) < 3 or len(set(first)) == 1 or len(set(second)) == 1:
        return None
    statistic, _ = spearmanr(first, second)
    return float(statistic)


def relative(rows: Iterable[tuple[str, float, float]]) -> tuple[Row, ...]:
    """Return rows of (name, paper, raymm) in units of the geometric mean of each side.

    One unknown factor common to all rows, such as samples per microbatch, then has no effect.
    """
    names, *sides = zip(*rows, strict=True)
    paper, raymm = (np.array(side) / statistics.geometric_mean(side) for side in sides)
    return tuple(
        Row(name, round(float(p), 4), float(r))
        for name, p, r in zip(names, paper, raymm, strict=True)
    )


def paired(
    rows: Sequence[tuple[str, float, float]], name: Callable[[str], str]
) -> tuple[Row, ...]:
    """Return the ratio of every second row to the row before it; ``name`` shortens its name."""
    return tuple(
        Row(name(second[0]), round(second[1] / first[1], 4), second[2] / first[2])
        for first, second in zip(rows[::2], rows[1::2], strict=True)
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")
