"""Labelled positions of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.modules.message import SOURCES, SourceSums
from raymm.kernels.host_copies import to_device

PAIR = 2
"""Number of rows of an answer pair, which stay on one process when a microbatch's rows are split.
"""


def label_mask(labels: torch.Tensor) -> torch.Tensor:
    """Return positions whose next token is a label: (B, T) int64 -> (B, T-1) bool.

    The first token of a sample is never a label: it has no preceding token, and prepending modality
    tokens must not change the number of labels.
    """
    return labels[:, 1:] != IGNORE_INDEX


# Labels store the source number of their sample above this bit, counted from 1; 0 means no source.
_SOURCE_BITS = 32


def with_sources(inputs: Mapping[str, Any], rows: bool = False) -> dict[str, Any]:
    """Return inputs whose ``labels`` (B, T) int64 also encode their source, from :data:`SOURCES`.

    The source then follows the labels through packing, token splits and stages. With ``rows``, the
    row number is the source. Inputs without sources are unchanged.
    """
    inputs = dict(inputs)
    if rows and "labels" in inputs:
        inputs[SOURCES] = torch.arange(len(inputs["labels"]), device="cpu")
    if (sources := inputs.pop(SOURCES, None)) is not None:
        labels = inputs["labels"]
        numbers = (sources.to(labels.device) + 1)[:, None] << _SOURCE_BITS
        inputs["labels"] = torch.where(labels == IGNORE_INDEX, labels, labels + numbers)
    return inputs


class Labelled:
    """Positions of a microbatch that have a label.

    Args:
        targets: (B, T) int64 on the host: the label that each token predicts, optionally from
            :func:`with_sources`.
        only_last: select the last position of every row, regardless of labels.
    """

    def __init__(
        self, targets: torch.Tensor, device: torch.device, only_last: bool = False
    ) -> None:
        self.shape, flat = targets.shape, targets.flatten()
        rows = (flat != IGNORE_INDEX).nonzero()[:, 0]
        if only_last:
            rows = torch.arange(1, self.shape[0] + 1) * self.shape[1] - 1
        labels, self._sources = flat[rows], torch.zeros(0, dtype=torch.int64)
        if not only_last:
            self._sources, labels = labels >> _SOURCE_BITS, labels & ((1 << _SOURCE_BITS) - 1)
        self.targets = to_device(labels, device)
        self._rows = to_device(rows, device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Select the labelled positions: (B, T, ...) -> (N, ...)."""
        return values.flatten(0, 1).index_select(0, self._rows)

    def by_source(
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        values: torch.Tensor, total: torch.Tensor,
    ) -> SourceSums:
        """Return per source the value of ``function`` and the label count, without gradient.

        ``function`` maps values (N, ...) and labels to a scalar sum; ``total`` is its value for
        all.
        """
        numbers, counts = self._sources.unique(return_counts=True)
        pairs = list(zip(numbers.tolist(), counts.tolist(), strict=True))
        if not pairs or not pairs[0][0]:
            return {}
        if len(pairs) == 1:
            return {pairs[0][0] - 1: (total.detach(), pairs[0][1])}
        sums: SourceSums = {}
        with torch.no_grad():
            for number, count in pairs:
                indices = to_device((self._sources == number).nonzero()[:, 0], values.device)
                sums[number - 1] = function(values[indices], self.targets[indices]), count
        return sums

    def row_sums(
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        values: torch.Tensor, rows: range,
    ) -> torch.Tensor:
        """Return (rows,), the scalar of ``function`` per row; 0 for rows without positions here.

        Requires labels :func:`with_sources` and a non-empty range of rows; values are (N, ...).
        """
        labels, numbers = self.targets, self._sources - 1 - rows.start
        if bool((numbers[1:] < numbers[:-1]).any()):  # packed tokens of several processes
            order = to_device(numbers.argsort(stable=True), values.device)
            values, labels = values[order], labels[order]
        counts = torch.bincount(numbers, minlength=len(rows)).tolist()
        by_row = zip(values.split(counts), labels.split(counts), strict=True)
        return torch.stack([function(row_values, targets) for row_values, targets in by_row])
