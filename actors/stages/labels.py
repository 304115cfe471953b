"""Labelled positions of a microbatch, and the losses of answer pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.modules.message import SOURCES, SourceSums
from raymm.actors.sharding.sample_rows import row_shares
from raymm.kernels.collectives.gather_tokens import CONTRIBUTOR
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.host_copies import to_device
from raymm.kernels.preference import PreferenceLoss

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


def pair_shares(count: int, samples: Exchange | None) -> range:
    """Return this process's part of ``count`` rows of answer pairs; all without an exchange."""
    if samples is None:
        return range(count)
    return row_shares(count, samples.size, PAIR)[samples.rank]


def compared(
    loss: PreferenceLoss, labelled: Labelled,
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], values: torch.Tensor,
    rows: range, reference: torch.Tensor | None, tokens: Exchange | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of rows, and their summed pair loss if the reference is given.

    Args:
        labelled: labels that encode their row (:func:`with_sources`).
        function: maps values (N, ...) and labels to the sum of cross entropies.
        rows: rows of this process. If empty, it computes another process's row, with no effect.
        reference: (B,) reference log-probabilities of all rows of the microbatch.
        tokens: the processes that split the rows' tokens. Each has the gradient for its own tokens;
            only the first process returns a non-zero loss.
    """
    if not rows:
        nothing = function(values, labelled.targets)
        return nothing.detach().new_zeros(0), None if reference is None else nothing
    scores = -labelled.row_sums(function, values, rows)
    if tokens is not None:
        scores = _summed(scores, tokens)
    if reference is None:
        return scores, None
    total = loss(scores, reference[rows.start : rows.stop])
    if tokens is not None and tokens.rank != CONTRIBUTOR:
        total = total - total.detach()
    return scores, total


def _summed(scores: torch.Tensor, exchange: Exchange) -> torch.Tensor:
    """Sum over processes in rank order, for identical bits; only the local part has a gradient."""
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    local = scores.detach()
    received = exchange.start(
        [(rank, local) for rank in peers],
        [(rank, (tuple(local.shape), local.dtype)) for rank in peers], local.device,
    ).wait()
    scores_of = dict(zip(peers, received, strict=True)) | {exchange.rank: scores}
    return torch.stack([scores_of[rank] for rank in range(exchange.size)]).sum(0)
