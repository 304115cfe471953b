"""Load-balancing loss of a mixture of experts' routers, over an entire step.

It is that of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6) as transformers computes it for
one batch (``load_balancing_loss_func``): over the rows of all layers together,

    L = E * sum over e of (C_e / N) * (S_e / N)

``C_e`` is how often expert e is among the k most likely experts of a row, ``S_e`` the sum of its
probabilities, and ``N`` the number of rows, without padding tokens. L is not a sum over
microbatches, but only ``S`` has a gradient. A pass before the step counts ``C``. Then every stage's
part of every microbatch is linear in its own ``S``, and the parts add up to L for all layouts and
schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class RouterSums(NamedTuple):
    """Sums over some layers and rows.

    Attributes:
        counts: (E,) float32, how often each expert is among the k most likely.
        probabilities: (E,) float32, sum of each expert's probabilities, with a gradient.
    """

    counts: torch.Tensor
    probabilities: torch.Tensor


@dataclass(frozen=True)
class Mixture:
    """Mixture-of-experts settings of a model; ``loss`` is None if routers have no loss."""

    loss: RouterLoss | None = None


@dataclass(frozen=True)
class RouterLoss:
    """Load-balancing loss of a model's routers.

    Attributes:
        experts: E, in every layer.
        top_k: number of experts per token.
        coefficient: factor of the loss when it is added.
    """

    experts: int
    top_k: int
    coefficient: float

    def of(self, logits: Sequence[torch.Tensor], real: torch.Tensor | None = None) -> RouterSums:
        """Return the sums over logits (R, E) or (B, T, E) of every router; ``real`` (R,) bool
        is True for rows that count."""
        first = logits[0]
        counts = torch.zeros(self.experts, device=first.device)
        probabilities = torch.zeros(self.experts, device=first.device)
        weight = None if real is None else real.to(first.device, torch.float32)
        for layer_logits in logits:
            scores = torch.softmax(layer_logits.reshape(-1, self.experts), dim=-1)
            chosen = torch.topk(scores.detach(), self.top_k, dim=-1).indices
            rows = torch.ones(len(scores), device=first.device) if weight is None else weight
            counts = counts.scatter_add(0, chosen.flatten(), rows.repeat_interleave(self.top_k))
            probabilities = probabilities + (scores.float() * rows[:, None]).sum(0)
        return RouterSums(counts, probabilities)

    def whole(self, sums: Sequence[RouterSums]) -> torch.Tensor:
        """Return the scalar loss of a step, given all its parts."""
        counts, probabilities = zip(*sums, strict=True)
        return self.part(RouterSums(torch.stack(counts).sum(0), torch.stack(probabilities).sum(0)))

    def part(self, own: RouterSums, step: Sequence[float] | None = None) -> torch.Tensor:
        """Return a part's scalar contribution to the step's loss; all contributions add up to it.

        Args:
            step: (E,) counts of the entire step; None if the part is all of it.
        """
        counts = own.counts if step is None else own.counts.new_tensor(step)
        # This order avoids overflow, and gives zero loss without rows.
        share = counts / (counts.sum() / self.top_k).clamp(min=1.0) ** 2
        return self.coefficient * self.experts * (share * own.probabilities).sum()
