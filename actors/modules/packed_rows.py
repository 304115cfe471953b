"""Packing: a microbatch's rows as one row of documents without padding.

Whatever the merge policy made of the rows stays as it is; what is packed is what goes through
the model. The mask keeps documents apart, position ids begin anew in each, and targets are
taken row by row before, so the loss is that of the rows (OmniBal §4.1).

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
    """
    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), perhaps ``position_ids``
            (..., B, T) or (T,), ``routed_tokens`` (B, T); what is None is left out.
        layout: (3, B, T), the rows' token layout; on the host, as targets may be.

    Returns:
        The same for one row: (1, P, H), (1, P), (..., 1, P), and ``token_layout`` (3, 1, P) with a
        document per document of every row.

    Raises:
        ValueError: if there is anything else for the model that belongs to tokens.
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
    places = real.flatten().nonzero()[:, 0]

    def packed(value: torch.Tensor, dim: int) -> torch.Tensor:
        """Real tokens of (..., B, T, ...), of which B is at ``dim``, in one row of their own."""
        taken = to_device(places, value.device)
        return value.flatten(dim, dim + 1).index_select(dim, taken).unsqueeze(dim)

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
    """Documents numbered through, so that those of different rows differ."""
    kinds, items, documents = (part[real] for part in layout)
    rows = torch.arange(real.shape[0], device=real.device)[:, None].expand_as(real)[real]
    first = torch.ones_like(rows, dtype=torch.bool)
    first[1:] = (rows[1:] != rows[:-1]) | (documents[1:] != documents[:-1])
    numbers = first.cumsum(0) - 1
    if len(numbers) and int(numbers[-1]) > _DOCUMENTS:
        raise ValueError(f"{int(numbers[-1]) + 1} documents in one microbatch; {_DOCUMENTS} fit")
    return torch.stack([kinds, items, numbers.to(torch.int16)])[:, None]
