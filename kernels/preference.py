"""Direct preference optimization (Rafailov et al. 2023): a loss on pairs of answers, computed from
the log-probabilities of the trained model and of a reference model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BASE, INITIAL = "base", "initial"


@dataclass(frozen=True)
class PreferenceLoss:
    """DPO loss ``-log sigmoid(beta * ((c - C) - (r - R)))`` of a pair (eq. 7), where c and r are
    the log-probabilities of the chosen and the rejected answer, and C and R those under the
    reference.

    Attributes:
        beta: weight of the deviation from the reference.
        label_smoothing: probability that the labels of a pair are swapped (conservative DPO).
        reference: ``"base"``, the model without its adapters; ``"initial"``, the model with its
            initial weights, which is evaluated once, before the first step.
        disable_dropout: train without the dropout of layers and adapters, as TRL does by default.

    Raises:
        ValueError: a field is out of range; the message names the field, its value and the range.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    reference: str = BASE
    disable_dropout: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise ValueError(f"beta is {self.beta!r}; accepted: a number above 0")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(
                f"label_smoothing is {self.label_smoothing!r}; accepted: from 0 to below 0.5"
            )

        if self.reference not in (BASE, INITIAL):
            raise ValueError(f"reference is {self.reference!r}; accepted: {BASE}, {INITIAL}")

    @property
    def asked_once(self) -> bool:
        """True if the reference is the model with its initial weights."""
        return self.reference == INITIAL

    def rewards(self, scores: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
        """Return means over pairs of the implicit rewards, with the metric names that TRL uses:
        ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, and ``rewards/accuracies``,
        the fraction of pairs whose chosen answer has the higher reward. Arguments are those of the
        call."""
        won = self.beta * (scores - reference)
        chosen, rejected = won[0::2], won[1::2]
        means = {
            "chosen": chosen, "rejected": rejected, "margins": chosen - rejected,
            "accuracies": (chosen > rejected).to(won.dtype),
        }
        return {f"rewards/{name}": float(values.mean()) for name, values in means.items()}

    def __call__(self, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Return the loss summed over pairs, a scalar.

        Args:
            scores: (B,) log-probabilities of answers; chosen and rejected answers alternate.
            reference: (B,) log-probabilities of the same answers under the reference.
        """
        ratios = scores - reference
        margins = self.beta * (ratios[0::2] - ratios[1::2])
        losses = -(1 - self.label_smoothing) * F.logsigmoid(margins)
        return (losses - self.label_smoothing * F.logsigmoid(-margins)).sum()
