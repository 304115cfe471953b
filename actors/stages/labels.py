"""Which tokens of a microbatch have a label, and what of their losses pairs of answers are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.modules.message import SOURCES, SourceSums
from raymm.actors.sharding.sample_rows import row_shares
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


def with_sources(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs whose labels say which source they are of, wherever they go: into rows that are
    packed, to processes that share tokens, through stages.

    Args:
        inputs: with ``labels`` (B, T) int64 and :data:`SOURCES`; without the latter they stay as
            they are.
    """
    inputs = dict(inputs)
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
        only_last: it is the last position that counts, whatever labels there are.

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
            rows = torch.tensor([len(flat) - 1])
        labels, self._sources = flat[rows], torch.zeros(0, dtype=torch.int64)
        if not only_last:
            self._sources, labels = labels >> _SOURCE_BITS, labels & ((1 << _SOURCE_BITS) - 1)
        self.targets = to_device(labels, device)
        self._counts = torch.bincount(rows // self.shape[1], minlength=self.shape[0]).tolist()
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
        self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], values: torch.Tensor
    ) -> torch.Tensor:
        """(B,): of each row's positions.

        Args:
            function: of values and labels, a scalar.
            values: (N, ...).
        """
        parts = zip(values.split(self._counts), self.targets.split(self._counts), strict=True)
        return torch.stack([function(own, labels) for own, labels in parts])


def compared(
    loss: PreferenceLoss, scores: torch.Tensor, reference: torch.Tensor | None,
    samples: Exchange | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities of a process's own rows, and the sum of its pairs' losses, if the
    reference is there.

    Args:
        loss: of pairs.
        scores: (B,), of the rows that the process works on; an odd one is nobody's
            (:func:`raymm.actors.sharding.sample_rows.take_rows`).
        reference: what it says of all rows of the microbatch.
        samples: the processes that share them.
    """
    if len(scores) % PAIR:
        return scores[:0], None if reference is None else 0 * scores.sum()
    if reference is None:
        return scores, None
    if samples is not None:
        own = row_shares(len(reference), samples.size, PAIR)[samples.rank]
        reference = reference[own.start : own.stop]
    return scores, loss(scores, reference)
