"""Checks and casts of query, key and value."""

from __future__ import annotations

from typing import NamedTuple

import torch


class BackwardTensors(NamedTuple):
    """Tensors that a backward pass of attention reads.

    ``out`` and ``lse`` cover all keys that the rows see. If ``key`` holds only a part of them, the
    gradients are that part's contribution.

    Attributes:
        grad_out, out: (B, Hq, Tq, Dv).
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        lse: (B, Hq, Tq), at least fp32.
    """

    grad_out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


def as_autocast(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value, cast to autocast's dtype if it is enabled."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value
    dtype = torch.get_autocast_dtype(device)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def prepare(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key and value, cast to autocast's dtype if it is enabled.

    Args:
        query, key, value: (B, Hq, Tq, D), (B, Hk, Tk, D) and (B, Hk, Tk, Dv).
        softcap: must be positive or None.

    Raises:
        ValueError: the tensors do not fit one another.
    """
    query, key, value = as_autocast(query, key, value)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if {query.dim(), key.dim(), value.dim()} != {4} or key.shape[:3] != value.shape[:3]:
        raise ValueError(f"expected (B, H, T, D), keys and values of the same tokens, got {shapes}")
    if query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"batch and head dim must agree, got {shapes}")
    if not key.shape[1] or query.shape[1] % key.shape[1]:
        raise ValueError(f"query heads must be a multiple of key heads, got {shapes}")
    if not query.dtype == key.dtype == value.dtype or not query.is_floating_point():
        raise ValueError(
            f"expected one floating dtype, got {query.dtype}, {key.dtype}, {value.dtype}"
        )
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, got {softcap}")
    return query, key, value
