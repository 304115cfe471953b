"""Direct preference optimisation (Rafailov et al. 2023): a loss of the log-probabilities that a
model and a reference give to pairs of answers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BASE, INITIAL = "base", "initial"


@dataclass(frozen=True)
class PreferenceLoss:
    """``-log sigmoid(beta * ((c - C) - (r - R)))`` of a pair (eq. 7), where c and r are the
    log-probabilities of the chosen and the rejected answer, C and R the reference's.

    Attributes:
        beta: how much it costs to be another than the reference.
        label_smoothing: probability that a pair is the wrong way round (conservative DPO).
        reference: ``"base"``, the model without its adapters; ``"initial"``, the model with the
            weights that a run begins with, which is asked once, before the first step.
        disable_dropout: train without the dropout of layers and adapters, as TRL does by default.

    Raises:
        ValueError: naming the field, its value and what is accepted.
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
        """Whether the reference is the model that a run begins with."""
        return self.reference == INITIAL

    def rewards(self, scores: torch.Tensor, reference: torch.Tensor) -> dict[str, float]:
        """Means over pairs of what the model has won over its reference, as TRL names them:
        ``rewards/chosen``, ``rewards/rejected``, ``rewards/margins``, and the share of pairs whose
        chosen answer has won more, ``rewards/accuracies``.

        Args:
            scores, reference: as of a call.
        """
        won = self.beta * (scores - reference)
        chosen, rejected = won[0::2], won[1::2]
        means = {
            "chosen": chosen, "rejected": rejected, "margins": chosen - rejected,
            "accuracies": (chosen > rejected).to(won.dtype),
        }
        return {f"rewards/{name}": float(values.mean()) for name, values in means.items()}

    def __call__(self, scores: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Sum over pairs, scalar.

        Args:
            scores: (B,), log-probabilities of answers: chosen and rejected one after another.
            reference: (B,), the reference's.
        """
        ratios = scores - reference
        margins = self.beta * (ratios[0::2] - ratios[1::2])
        losses = -(1 - self.label_smoothing) * F.logsigmoid(margins)
        return (losses - self.label_smoothing * F.logsigmoid(-margins)).sum()
