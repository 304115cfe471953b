"""The loss that mixtures of experts have for their routers, over a whole step.

It is that of the Switch Transformer (arXiv 2101.03961, eq. 4 to 6) as transformers computes it for
one batch (``load_balancing_loss_func``): over the rows of all layers together,

    L = E * sum over e of (C_e / N) * (S_e / N)

where ``C_e`` is how often expert e is among the k likeliest of a row, ``S_e`` the sum of its
probabilities, and ``N`` the number of rows, of tokens that are no padding. It is no sum over
microbatches; but only ``S`` has a gradient, so once the step's ``C`` are known, which a pass
before it counts, every stage's part of every microbatch is linear in its own ``S``, and the parts
add up to L, whatever the microbatches, layouts and schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class RouterSums(NamedTuple):
    """Of some layers and rows.

    Attributes:
        counts: (E,) float32, how often each expert is among the likeliest.
        probabilities: (E,) float32, the sum of each one's, with a gradient.
    """

    counts: torch.Tensor
    probabilities: torch.Tensor


@dataclass(frozen=True)
class Mixture:
    """That a model is a mixture of experts.

    Attributes:
        loss: for its routers; None if it has none, or none is wanted.
    """

    loss: RouterLoss | None = None


@dataclass(frozen=True)
class RouterLoss:
    """A model's loss for its routers.

    Attributes:
        experts: E, of every layer.
        top_k: how many of them a row's token goes to.
        coefficient: that the loss is multiplied with when it is added.
    """

    experts: int
    top_k: int
    coefficient: float

    def of(self, logits: Sequence[torch.Tensor], real: torch.Tensor | None = None) -> RouterSums:
        """
        Args:
            logits: of every router (R, E) or (B, T, E).
            real: (R,) bool, the rows that count; None for all.
        """
        first = logits[0]
        counts = torch.zeros(self.experts, device=first.device)
        probabilities = torch.zeros(self.experts, device=first.device)
        weight = None if real is None else real.to(first.device, torch.float32)
        for of_layer in logits:
            of_rows = torch.softmax(of_layer.reshape(-1, self.experts), dim=-1)
            chosen = torch.topk(of_rows.detach(), self.top_k, dim=-1).indices
            rows = torch.ones(len(of_rows), device=first.device) if weight is None else weight
            counts = counts.scatter_add(0, chosen.flatten(), rows.repeat_interleave(self.top_k))
            probabilities = probabilities + (of_rows.float() * rows[:, None]).sum(0)
        return RouterSums(counts, probabilities)

    def whole(self, sums: Sequence[RouterSums]) -> torch.Tensor:
        """A scalar: the loss of all these parts, which are the step."""
        counts, probabilities = zip(*sums, strict=True)
        return self.part(RouterSums(torch.stack(counts).sum(0), torch.stack(probabilities).sum(0)))

    def part(self, own: RouterSums, step: Sequence[float] | None = None) -> torch.Tensor:
        """A scalar; all parts of a step add up to what is added to its cross entropy.

        Args:
            own: of the layers and rows of the part.
            step: (E,) counts of the whole step; None: the part is all of it.
        """
        counts = own.counts if step is None else own.counts.new_tensor(step)
        # In this order nothing overflows, and no rows give no loss.
        share = counts / (counts.sum() / self.top_k).clamp(min=1.0) ** 2
        return self.coefficient * self.experts * (share * own.probabilities).sum()
