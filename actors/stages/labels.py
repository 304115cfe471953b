"""Which tokens of a microbatch have a label, and what of their losses pairs of answers are."""

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
"""Rows that stay together where processes share a microbatch's."""


def label_mask(labels: torch.Tensor) -> torch.Tensor:
    """Positions whose next token is a label: (B, T) int64 -> (B, T-1) bool.

    The first token of a sample is never a label: alone it has nothing before it, and
    whether modality tokens are put before it must not change the number of labels.
    """
    return labels[:, 1:] != IGNORE_INDEX


# Labels carry the number of their sample's source above so many bits, from 1; 0 stands for none.
_SOURCE_BITS = 32


def with_sources(inputs: Mapping[str, Any], rows: bool = False) -> dict[str, Any]:
    """Inputs whose labels say which source they are of, wherever they go: into rows that are
    packed, to processes that share tokens, through stages.

    Args:
        inputs: with ``labels`` (B, T) int64 and :data:`SOURCES`; without the latter they stay as
            they are.
        rows: every row is a source of its own, by number.
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
    """The positions of a microbatch that have a label.

    Args:
        targets: (B, T) int64 on the host: per token the label that it is to predict, perhaps
            :func:`with_sources`.
        device: where the stage is.
        only_last: it is every row's last position that counts, whatever labels there are.

    Attributes:
        shape: (B, T).
        targets: (N,) int64, the labels.
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
        """(B, T, ...) -> (N, ...), those of the positions."""
        return values.flatten(0, 1).index_select(0, self._rows)

    def by_source(
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        values: torch.Tensor, total: torch.Tensor,
    ) -> SourceSums:
        """Of each source that labels are of, what ``function`` gives for them, without gradient.

        Args:
            function: of values and labels, a scalar: a sum over them.
            values: (N, ...).
            total: what it gives for all of them.
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
                own = to_device((self._sources == number).nonzero()[:, 0], values.device)
                sums[number - 1] = function(values[own], self.targets[own]), count
        return sums

    def row_sums(
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        values: torch.Tensor, rows: range,
    ) -> torch.Tensor:
        """(rows,): of each row's positions; 0 of a row that has none here.

        Args:
            function: of values and labels, a scalar.
            values: (N, ...).
            rows: numbers, one or more, of labels :func:`with_sources`.
        """
        labels, numbers = self.targets, self._sources - 1 - rows.start
        if bool((numbers[1:] < numbers[:-1]).any()):  # tokens of several processes, packed
            order = to_device(numbers.argsort(stable=True), values.device)
            values, labels = values[order], labels[order]
        counts = torch.bincount(numbers, minlength=len(rows)).tolist()
        parts = zip(values.split(counts), labels.split(counts), strict=True)
        return torch.stack([function(own, targets) for own, targets in parts])


def pair_shares(count: int, samples: Exchange | None) -> range:
    """A process's rows of pairs of answers.

    Args:
        count: of all rows.
        samples: the processes that share them; None for one alone.
    """
    if samples is None:
        return range(count)
    return row_shares(count, samples.size, PAIR)[samples.rank]


def compared(
    loss: PreferenceLoss, labelled: Labelled,
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], values: torch.Tensor,
    rows: range, reference: torch.Tensor | None, tokens: Exchange | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of rows, and the sum of their pairs' losses, if the reference is there.

    Args:
        loss: of pairs.
        labelled: labels that say which rows they are of.
        function: of values and labels, a scalar: the sum of their cross entropies.
        values: (N, ...), of the process's tokens.
        rows: that the process works on; one without works on another's, for nothing.
        reference: (B,), what it says of all rows of the microbatch.
        tokens: the processes that share the rows' tokens. All have the loss's gradient, of their
            own tokens; the loss itself counts on the first only.
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
    """Over processes, in their order, so that all get the same bits; the gradient is the own
    part's."""
    others = [place for place in range(exchange.size) if place != exchange.rank]
    own = scores.detach()
    received = exchange.start(
        [(place, own) for place in others],
        [(place, (tuple(own.shape), own.dtype)) for place in others], own.device,
    ).wait()
    parts = dict(zip(others, received, strict=True)) | {exchange.rank: scores}
    return torch.stack([parts[place] for place in range(exchange.size)]).sum(0)
