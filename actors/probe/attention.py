"""The probe of attention: does a language model obey a mask, may its tokens be shared out?

As in :mod:`raymm.actors.probe.cut`, nothing knows a model by name: a shrunk copy runs, and
what changes where a token changes says what its layers see.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raymm.actors.modules.blocks import input_embeddings, method_of
from raymm.actors.probe.cut import ProbeError, small_language_model
from raymm.actors.weights.source import ModuleSource
from raymm.kernels.attention import attention
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import causal, multimodal
from raymm.kernels.mask.spans import Span

_TOKENS = 8
# Relative to the largest output. Not exactly zero: experts multiply as many rows at once as
# tokens chose them, which changes the last bits of other tokens.
_NOISE = 1e-5
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)


def probe_mask(source: ModuleSource) -> None:
    """Check that a causal language model's attention obeys a raymm mask.

    Raises:
        ProbeError: if it has its own attention, drops the mask on the way to its layers, or
            needs more than a mask (sinks, position biases, dropout).
    """
    name, model = _model_with_masks(source, "have a mask; leave mask out")
    model.train(source.skeleton().training)
    half = _TOKENS // 2
    embeds = _embeddings(model)
    other = embeds.clone()
    # Not a constant, which layer norms would take away.
    other[:, half - 1] += torch.randn(embeds.shape[2], generator=torch.Generator().manual_seed(1))
    try:
        first, second = (
            _logits(model, each, raymm_mask=(_probe_mask(),)) for each in (embeds, other)
        )
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot have a mask: {error}") from error
    change = (first - second).norm(dim=-1)[0] / first.norm(dim=-1).max()
    if not bool((change[half:] <= _NOISE).all()):
        raise ProbeError(
            f"{name} lets a token see another document under a mask that hides it: something in "
            "it mixes tokens without the mask"
        )
    if not bool((change[: half - 1] > _NOISE).all()):
        raise ProbeError(
            f"{name} does not let a token see a later one under a mask that shows it: something "
            "in it hides tokens besides the mask"
        )


def probe_shared_tokens(
    source: ModuleSource, has_mask: bool, what: str = "have cp above 1"
) -> None:
    """Check that processes may each have a part of a sample's tokens (context parallelism), or one
    row several samples (packing): that nothing but attention knows of other tokens, and
    positions are what ``position_ids`` say.

    Args:
        source: of the language model.
        has_mask: whether it is given a mask; if not, its own must be the causal one.
        what: it is to do, for errors.

    Raises:
        ProbeError: as :func:`probe_mask`, or if tokens in another order give another result.
    """
    name, model = _model_with_masks(source, what)
    probe_mask(source)
    embeds, order = _embeddings(model), torch.arange(_TOKENS).roll(3).flip(0)
    back = order.argsort()

    def attend(*tensors: Any, **options: Any) -> torch.Tensor:
        query, key, value = (each[:, :, back] for each in tensors[:3])
        return attention(query, key, value, tensors[3], **options)[0][:, :, order]

    masks = {hf_attention.MASK_ARGUMENT: (_probe_mask() if has_mask else causal(_TOKENS),)}
    shared = {
        hf_attention.ATTEND_ARGUMENT: attend,
        "position_ids": order[None],
        "attention_mask": torch.ones(1, _TOKENS, dtype=torch.int64),
    }
    try:
        first = _logits(model, embeds, **(masks if has_mask else {}))
        second = _logits(model, embeds[:, order], **masks, **shared)
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot {what}: {error}") from error
    change = (first[:, order] - second).norm(dim=-1) / first.norm(dim=-1).max()
    if not bool((change <= _NOISE).all()):
        raise ProbeError(
            f"{name} cannot {what}: its result depends on the order of tokens besides "
            f"their position_ids{'' if has_mask else ', or its own mask is not causal'}"
        )


def _model_with_masks(source: ModuleSource, what: str) -> tuple[str, nn.Module]:
    skeleton = source.skeleton()
    name = type(skeleton).__name__
    if not hf_attention.can_use(skeleton):
        raise ProbeError(
            f"{name} does not take its attention from transformers' AttentionInterface, so it "
            f"cannot {what}"
        )
    hf_attention.register()
    model = small_language_model(source)
    method_of(model, "set_attn_implementation")(hf_attention.NAME)
    return name, model


def _probe_mask() -> AttentionMask:
    """Two documents: an image, whose tokens see one another, and causal text."""
    half = _TOKENS // 2
    return multimodal(_TOKENS, [Span(0, half)], document_lengths=[half, _TOKENS - half])


@torch.no_grad()
def _embeddings(model: nn.Module) -> torch.Tensor:
    embedding = input_embeddings(model)
    return embedding(torch.arange(_TOKENS)[None] % embedding.weight.shape[0])


@torch.no_grad()
def _logits(model: nn.Module, embeds: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # dropout drops the same in every run
        return model(inputs_embeds=embeds, use_cache=False, **arguments).logits
