"""Probe of attention: does a language model follow a mask, and can its tokens be split?

As in :mod:`raymm.actors.probe.cut`, a small copy runs, without knowledge of the model. Changes of
its output after a token has changed show what its layers see.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from itertools import islice
from typing import Any

import torch
from torch import nn

from raymm.actors.modules.blocks import block_list, find_blocks, input_embeddings, method_of
from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import small_language_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import ProbeError
from raymm.kernels.attention import attention
from raymm.kernels.hf import self_attention as hf_attention
from raymm.kernels.hf.document_rows import (
    DOCUMENTS_ARGUMENT,
    Lengths,
    SharedRows,
    mix_by_documents,
)
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.patterns import causal, documents, multimodal
from raymm.kernels.mask.spans import Span

_TOKENS = 8
# Relative to the largest output. Not exactly zero: experts multiply all rows that chose them at
# once, which changes the last bits of other tokens.
_NOISE = 1e-5
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
_FAILS = "its forward fails with the arguments that this needs"


def find_mixers(source: ModuleSource) -> frozenset[str]:
    """Return classes of layers that mix documents despite a mask, and are correct with separate
    rows.

    Examples are convolutions, linear attention and state-space layers, whose input must have one
    document per row (:mod:`raymm.kernels.hf.document_rows`). The result is empty if the model
    cannot follow a mask.
    """
    try:
        _, model = _model_with_masks(source, "have a mask")
    except ProbeError:
        return frozenset()
    if (path := find_blocks(model)) is None:
        return frozenset()
    candidates = mixing_layers(
        list(block_list(model, path)),
        lambda: _logits(model, _embeddings(model), raymm_mask=(_probe_mask(),)),
        _TOKENS // 2,
    )
    for mixers in filter(None, candidates):
        with contextlib.suppress(ProbeError):
            probe_mask(source, mixers)
            return mixers
    return frozenset()


def mixing_layers(
    blocks: Collection[nn.Module], run: Callable[[], Any], start: int
) -> list[frozenset[str]]:
    """Return candidate sets of classes of layers that leak from the first document to the second.

    The candidates are the outermost and the innermost such layers; attention may be inside the
    former. ``run`` runs the model on one row with two documents, the second from ``start`` on.
    """
    calls: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.setdefault(layer, (args, kwargs))

    layers = dict.fromkeys(
        each for block in blocks for each in islice(block.modules(), 1, None)
        if type(each) is not nn.Linear  # which never mixes tokens
    )
    hooks = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        run()
    except _FAILURES:
        return [frozenset()]  # the next probe reports the reason
    finally:
        for hook in hooks:
            hook.remove()
    mixing = {each for each in calls if _carries_over(each, *calls[each], start)}

    def outer(layer: nn.Module) -> set[str]:
        class_names = [{type(c).__name__} if c in mixing else outer(c) for c in layer.children()]
        return set().union(*class_names)

    inner = {m for m in mixing if not mixing & set(islice(m.modules(), 1, None))}
    candidates = [set().union(*map(outer, blocks)), {type(each).__name__ for each in inner}]
    return list(dict.fromkeys(map(frozenset, candidates)))


@torch.no_grad()
def _carries_over(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], start: int
) -> bool:
    """Return True if a layer's output from ``start`` on depends on the token before."""
    values = [*args, *kwargs.values()]
    tensors = (v for v in values if isinstance(v, torch.Tensor) and v.is_floating_point())
    hidden = next((v for v in tensors if v.dim() == 3 and v.shape[0] == 1), None)
    if hidden is None or hidden.shape[1] <= start:
        return False
    noisy = hidden.clone()
    noisy[:, start - 1] += torch.randn(hidden.shape[2], generator=torch.Generator().manual_seed(1))
    changed = [noisy if value is hidden else value for value in values]
    try:
        first, second = (
            layer(*each[: len(args)], **dict(zip(kwargs, each[len(args) :], strict=True)))
            for each in (values, changed)
        )
    except _FAILURES:
        return False
    if isinstance(first, tuple):
        first, second = first[0], second[0]
    if not isinstance(first, torch.Tensor) or first.shape[:2] != hidden.shape[:2]:
        return False
    first, second = first.float(), second.float()  # token indices are integers
    return bool((first - second)[:, start:].norm() > _NOISE * first.norm())


def probe_mask(source: ModuleSource, mixers: Collection[str] = ()) -> None:
    """Check that a causal language model's attention follows a raymm mask.

    Raises:
        ProbeError: the model has its own attention, loses the mask on the way to its layers, or
            needs more than a mask (sinks, position biases, dropout).
    """
    name, model = _model_with_masks(source, "have a mask; leave mask out")
    documents = _mixing(model, mixers, ((_TOKENS // 2, _TOKENS - _TOKENS // 2),))
    model.train(source.skeleton().training)
    half = _TOKENS // 2
    embeds = _embeddings(model)
    noisy = embeds.clone()
    # Not a constant, which layer norms would remove.
    noisy[:, half - 1] += torch.randn(embeds.shape[2], generator=torch.Generator().manual_seed(1))
    try:
        first, second = (
            _logits(model, each, raymm_mask=(_probe_mask(),), **documents)
            for each in (embeds, noisy)
        )
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot have a mask{because(error, _FAILS)}") from error
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


def probe_packing(source: ModuleSource, has_mask: bool, mixers: Collection[str] = ()) -> None:
    """Check that samples packed into one row give the same results as separate rows.

    Without ``has_mask``, the model's own mask must be causal.

    Raises:
        ProbeError: see :func:`probe_mask`; or the results differ.
    """
    try:
        _probe_packing(source, has_mask, mixers)
    except ProbeError as error:
        raise ProbeError(f"packing is True; accepted: False. {error}") from error


def _probe_packing(source: ModuleSource, has_mask: bool, mixers: Collection[str]) -> None:
    ability = "have its samples packed"
    name, model = _model_with_masks(source, ability)
    probe_mask(source, mixers)
    lengths = (_TOKENS, _TOKENS // 2 + 1)
    row = _embeddings(model)
    joined = torch.cat([row, row[:, -lengths[1] :]], dim=1)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    try:
        rows = [_logits(model, row), _logits(model, joined[:, _TOKENS:])]
        if has_mask:
            masks = [multimodal(n, [Span(0, n // 2)]) for n in lengths]
            rows = [
                _logits(model, each, raymm_mask=(mask,))
                for each, mask in zip((row, joined[:, _TOKENS:]), masks, strict=True)
            ]
            spans = [Span(0, lengths[0] // 2), Span(_TOKENS, _TOKENS + lengths[1] // 2)]
            mask = multimodal(sum(lengths), spans, document_lengths=lengths)
        else:
            mask = documents(lengths)
        arguments = _mixing(model, mixers, (lengths,))
        packed = _logits(model, joined, raymm_mask=(mask,), position_ids=positions, **arguments)
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot {ability}{because(error, _FAILS)}") from error
    due = torch.cat(rows, dim=1)
    if not bool((packed - due).norm() <= _NOISE * due.norm()):
        raise ProbeError(
            f"{name} cannot {ability}: samples in one row give another result than samples in "
            f"separate rows{'' if has_mask else ', or its own mask is not causal'}"
        )


def probe_shared_tokens(source: ModuleSource, has_mask: bool, mixers: Collection[str]) -> None:
    """Check that a sample's tokens can be split over processes (context parallelism).

    Only attention, and the ``mixers`` (:func:`find_mixers`), which get all tokens, may depend on
    other tokens, and positions must follow ``position_ids``. Without ``has_mask``, the model's own
    mask must be causal.

    Raises:
        ProbeError: see :func:`probe_mask`; or tokens in another order give another result.
    """
    ability = "have cp above 1"
    name, model = _model_with_masks(source, ability)
    probe_mask(source, mixers)
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
    length = (_TOKENS // 2, _TOKENS - _TOKENS // 2) if has_mask else (_TOKENS,)
    arguments = _mixing(model, mixers, (length,))
    if arguments:
        shared[DOCUMENTS_ARGUMENT] = SharedRows((length,), [order], 0, lambda value: value)
    try:
        first = _logits(model, embeds, **(masks | arguments if has_mask else {}))
        second = _logits(model, embeds[:, order], **masks, **shared)
    except _FAILURES as error:
        raise ProbeError(f"{name} cannot {ability}{because(error, _FAILS)}") from error
    change = (first[:, order] - second).norm(dim=-1) / first.norm(dim=-1).max()
    if not bool((change <= _NOISE).all()):
        raise ProbeError(
            f"{name} cannot {ability}: its result depends on the order of tokens besides their "
            f"position_ids{'' if has_mask else ', or its own mask is not causal'}"
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


def _mixing(
    model: nn.Module, mixers: Collection[str], lengths: Lengths
) -> dict[str, Lengths]:
    """Prepare mixing layers for documents as rows, and return the model's argument for them."""
    path = find_blocks(model)
    if not mixers or path is None:
        return {}
    mix_by_documents(block_list(model, path), mixers)
    return {DOCUMENTS_ARGUMENT: lengths}


def _probe_mask() -> AttentionMask:
    """Return a mask of two documents: an image with full attention, and causal text."""
    half = _TOKENS // 2
    return multimodal(_TOKENS, [Span(0, half)], document_lengths=[half, _TOKENS - half])


@torch.no_grad()
def _embeddings(model: nn.Module) -> torch.Tensor:
    embedding = input_embeddings(model)
    return embedding(torch.arange(_TOKENS)[None] % embedding.weight.shape[0])


@torch.no_grad()
def _logits(model: nn.Module, embeds: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)  # the same dropout in every run
        return model(inputs_embeds=embeds, use_cache=False, **arguments).logits
