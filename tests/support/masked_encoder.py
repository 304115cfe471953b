"""A plain encoder whose stages read inputs in different places."""

import torch
from torch import nn


class Masked(nn.Module):
    """Encoder whose stem reads a scale, blocks a float mask, and the final part a factor."""

    hidden_size = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None,
        scale: torch.Tensor | None = None, factor: float = 1.0,
    ) -> torch.Tensor:  # fmt: skip
        """Map (items, tokens, 4) to the same; ``mask`` is (items, tokens), ``scale`` (items,)."""
        hidden = self.stem(x if scale is None else x * scale[:, None, None])
        for block in self.blocks:
            hidden = block(hidden) if mask is None else block(hidden) * mask[..., None]
        return hidden * factor
