"""Attention with a raymm mask, on the device of the tensors.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``Tq`` rows, ``Tk`` keys, ``D`` head
dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from raymm.kernels.choice.choice import KERNEL_CHOICE, chosen_attention
from raymm.kernels.flash.operands import prepare
from raymm.kernels.mask.mask import AttentionMask, as_masks


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: AttentionMask | Sequence[AttentionMask],
    *,
    scale: float | None = None,
    softcap: float | None = None,
    lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute softmax(scale * Q K^T where visible) V without O(Tq * Tk) memory.

    A CPU runs ATen's flash attention block by block. A GPU runs Triton kernels, or a faster kernel
    if :mod:`raymm.kernels.choice.choice` finds one.

    Args:
        query: (B, Hq, Tq, D).
        key: (B, Hk, Tk, D), of the same dtype; Hq is a multiple of Hk (GQA). Under autocast all
            three are cast to its dtype, as PyTorch's attention does.
        value: (B, Hk, Tk, Dv); its head dim is the output's.
        mask: one for all sequences, or one each.
        scale: default ``D ** -0.5``.
        softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
        lse: False if the caller does not need the LSE, which may then be None: kernels of libraries
            do not return it.

    Returns:
        Output (B, Hq, Tq, Dv) in the dtype of the query, and LSE (B, Hq, Tq) fp32 (natural log),
        which carries no gradient. A row that sees no key has output 0, LSE -inf and no gradient.

    Raises:
        ModelError: the masks do not fit the tensors.
        ValueError: the tensors do not fit one another.
    """
    device = query.device.type
    query, key, value = prepare(query, key, value, softcap)
    masks = as_masks(mask, query.shape[0], query.shape[2], key.shape[2])
    if device == "cpu":
        from raymm.kernels.flash.cpu.attention import cpu_attention as run
    else:
        from raymm.kernels.flash.gpu.attention import triton_attention
        from raymm.kernels.flash.gpu.launch_configs import Launch

        launch = Launch(unordered=KERNEL_CHOICE.kernels == "raymm_unordered")
        kernel = partial(triton_attention, launch=launch)
        run = chosen_attention(
            query, key, value, masks, scale=scale, softcap=softcap, own=kernel, lse=lse
        )
    return run(query, key, value, masks, scale=scale, softcap=softcap)
