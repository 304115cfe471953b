"""Packing of a microbatch's rows into one row of documents without padding (OmniBal §4.1).

Only the model's inputs change, after the merge policy. The mask separates documents and position
ids restart in each. Targets are computed per row before.

Legend: ``B`` rows, ``T`` tokens of the longest, ``P`` tokens of all rows without padding, ``H``
hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.actors.modules.message import ROUTED_TOKENS
from raymm.actors.modules.token_layout import PADDING
from raymm.kernels.host_copies import to_device

_DOCUMENTS = torch.iinfo(torch.int16).max


def pack_rows(merged: Mapping[str, Any], layout: torch.Tensor) -> dict[str, torch.Tensor]:
    """Pack the rows of a microbatch into one row: (1, P, H), (1, P), (..., 1, P). Raise a
    ``ValueError`` if ``merged`` has other entries.

    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), optionally ``position_ids`` (...,
            B, T) or (T,), and ``routed_tokens`` (B, T). None values are dropped.
        layout: (3, B, T), the rows' token layout, on the host; becomes ``token_layout`` (3, 1, P).
    """
    accepted = {"inputs_embeds", "targets", "position_ids", ROUTED_TOKENS}
    present = {name for name, value in merged.items() if value is not None}
    if unknown := sorted(present - accepted):
        raise ValueError(
            f"the merge policy returned {unknown}; accepted for a language model with packing: "
            f"{sorted(accepted)}"
        )
    real = layout[2] != PADDING
    B, T = real.shape
    positions = real.flatten().nonzero()[:, 0]

    def packed(value: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the real tokens of (..., B, T, ...), with B at ``dim``, as a single row."""
        indices = to_device(positions, value.device)
        return value.flatten(dim, dim + 1).index_select(dim, indices).unsqueeze(dim)

    ids = merged.get("position_ids")
    if ids is None:
        ids = torch.arange(T, device=merged["inputs_embeds"].device)
    ids = ids.expand(*ids.shape[:-2], B, T)
    routed = {n: packed(merged[n], 0) for n in (ROUTED_TOKENS,) if n in merged}
    return {
        **routed,
        "inputs_embeds": packed(merged["inputs_embeds"], 0),
        "targets": packed(merged["targets"], 0),
        "position_ids": packed(ids, ids.dim() - 2),
        "token_layout": _one_row(layout, real),
    }


def _one_row(layout: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """Renumber documents so that those of different rows differ."""
    kinds, items, documents = (plane[real] for plane in layout)
    rows = torch.arange(real.shape[0], device=real.device)[:, None].expand_as(real)[real]
    first = torch.ones_like(rows, dtype=torch.bool)
    first[1:] = (rows[1:] != rows[:-1]) | (documents[1:] != documents[:-1])
    numbers = first.cumsum(0) - 1
    if len(numbers) and int(numbers[-1]) > _DOCUMENTS:
        raise ValueError(f"{int(numbers[-1]) + 1} documents in one microbatch; {_DOCUMENTS} fit")
    return torch.stack([kinds, items, numbers.to(torch.int16)])[:, None]
