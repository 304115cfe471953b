"""Attention kernels of torch for masks that need no mask tensor: scaled dot product attention, and
FlashAttention over packed documents."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from raymm.kernels.mask.columns import BASES, SLOPES, START
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import documents

_FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
"""Back ends in the order of preference. Others would materialize scores."""
_CACHED_BATCHES = 16
_CACHED_FORMS = 256


def sdpa_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    masks: tuple[AttentionMask, ...], *, scale: float | None = None, softcap: float | None = None,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute :func:`raymm.kernels.attention.attention` without LSE by torch's
    ``scaled_dot_product_attention``, with the cuDNN back end or FlashAttention.

    Raises:
        ValueError: a mask is neither full nor causal, or there is a softcap.
        RuntimeError: no fused back end supports the tensors.
    """
    forms = _forms(masks, softcap)
    if any(len(form.lengths) > 1 or form.window is not None for form in forms):
        raise ValueError(f"expected full or causal masks, got {forms[0].name}")
    with sdpa_kernel(_FUSED, set_priority=True):
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=forms[0].causal, scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    return out, None


def varlen_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    masks: tuple[AttentionMask, ...], *, scale: float | None = None, softcap: float | None = None,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute :func:`raymm.kernels.attention.attention` without LSE by FlashAttention over the
    documents of all rows: torch's ``varlen_attn`` (torch 2.10 and newer), with FlashAttention 4 if
    its package is installed.

    Raises:
        ValueError: the masks do not have one form, or there is a softcap.
        ImportError: torch has no ``varlen_attn``.
    """
    from torch.nn.attention.varlen import varlen_attn

    forms = _forms(masks, softcap)
    _activate_newest()
    batch, _, tokens, _ = query.shape
    ends, longest = _ends(masks, query.device)
    left = -1 if forms[0].window is None else forms[0].window - 1
    query, key, value = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))
    out = varlen_attn(
        query, key, value, ends, ends, longest, longest, scale=scale,
        window_size=(left, 0 if forms[0].causal else -1),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, torch.Tensor)  # a tuple only with return_aux
    return out.unflatten(0, (batch, tokens)).transpose(1, 2), None


def library_kernels(masks: tuple[AttentionMask, ...], softcap: float | None) -> Sequence[str]:
    """Return the names of the kernels here that can compute masks."""
    forms = batch_form(masks)
    if not forms or softcap is not None:
        return ()
    if all(len(form.lengths) == 1 for form in forms) and forms[0].window is None:
        return ("sdpa", "varlen")
    return ("varlen",)


def _forms(masks: tuple[AttentionMask, ...], softcap: float | None) -> tuple[PlainForm, ...]:
    forms = batch_form(masks)
    if not forms or softcap is not None:
        raise ValueError("expected masks of full or causal documents of one window, and no softcap")
    return forms


@lru_cache(_CACHED_BATCHES)
def _ends(masks: tuple[AttentionMask, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    """Return 0 and the end of each document in the batch, (N + 1,) int32, and the most tokens of
    one; cached for all layers of a model and both passes."""
    lengths = [length for form in batch_form(masks) for length in form.lengths]
    ends = list(itertools.accumulate(lengths, initial=0))
    return torch.tensor(ends, dtype=torch.int32).to(device), max(lengths)


@cache
def _activate_newest() -> None:
    """Replace torch's FlashAttention by version 4 if its package is installed."""
    if importlib.util.find_spec("flash_attn") is None:
        return
    try:
        from torch.nn.attention import activate_flash_attention_impl
    except ImportError:  # torch before 2.11
        return
    if importlib.util.find_spec("flash_attn.cute") is not None:
        activate_flash_attention_impl("FA4")


class PlainForm(NamedTuple):
    """Form of a self-attention mask over documents that follow one another.

    Attributes:
        lengths: tokens of each document.
        causal: True if a token sees only itself and earlier tokens.
        window: most tokens that a token sees, itself included; None for no window.
    """

    lengths: tuple[int, ...]
    causal: bool
    window: int | None

    @property
    def name(self) -> str:
        """``"full"`` or ``"causal"``, with ``"_documents"`` and ``"_window"``."""
        name = "causal" if self.causal else "full"
        name += "_documents" if len(self.lengths) > 1 else ""
        return name + ("_window" if self.window is not None else "")


@lru_cache(_CACHED_FORMS)
def plain_form(mask: AttentionMask) -> PlainForm | None:
    """Return the form of a mask; None if it has no such form."""
    table, length = mask.query_table, mask.n_queries
    if not length or length != mask.n_keys or mask.needs_bits:
        return None
    starts, lo, slopes = table[:, START], table[:, BASES][:, 0], table[:, SLOPES]
    firsts = starts[(slopes[:, 0] == 0) & (lo == starts)]
    if not len(firsts) or firsts[0] != 0:
        return None
    causal, moving = bool(slopes[:, 1].all()), lo[slopes[:, 0] == 1]
    window = int(1 - moving[0]) if len(moving) else None
    if window is not None and (window < 1 or not causal):
        return None
    lengths = tuple(np.diff(np.append(firsts, length)).tolist())
    expected = documents(lengths, causal=causal)
    if window is not None:
        expected = expected.windowed(window)
    if not np.array_equal(expected.bounds(), mask.bounds()):
        return None
    return PlainForm(lengths, causal, window)


def batch_form(masks: tuple[AttentionMask, ...]) -> tuple[PlainForm, ...]:
    """Return the form of each mask of a batch; empty if a mask has none, or if they differ in more
    than the lengths of documents."""
    forms = [plain_form(mask) for mask in masks]
    plain = tuple(form for form in forms if form is not None)
    kinds = {(form.causal, form.window) for form in plain}
    return plain if len(plain) == len(forms) and len(kinds) == 1 else ()
