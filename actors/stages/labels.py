"""Which tokens of a microbatch have a label."""

from __future__ import annotations

from collections.abc import Callable

import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.kernels.host_copies import to_device


def label_mask(labels: torch.Tensor) -> torch.Tensor:
    """Positions whose next token is a label: (B, T) int64 -> (B, T-1) bool.

    The first token of a sample is never a label: alone it has nothing before it, and
    whether modality tokens are put before it must not change the number of labels.
    """
    return labels[:, 1:] != IGNORE_INDEX


class Labelled:
    """The positions of a microbatch that have a label.

    Args:
        targets: (B, T) int64 on the host: per token the label that it is to predict.
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
        self.targets = to_device(flat[rows], device)
        self._counts = torch.bincount(rows // self.shape[1], minlength=self.shape[0]).tolist()
        self._rows = to_device(rows, device)

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """(B, T, ...) -> (N, ...), those of the positions."""
        return values.flatten(0, 1).index_select(0, self._rows)

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
