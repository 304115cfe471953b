"""Cross attention of Hugging Face models whose text and visual tokens are split over processes.

    share_cross_attention(model)      # once: MllamaForConditionalGeneration, Idefics, ...
    cross = CrossAttention(...)       # per batch: token layouts and masks
    model(**part_of_inputs, **{CROSS_ARGUMENT: cross, MASK_ARGUMENT: ..., ATTEND_ARGUMENT: ...})

The model's classes and forwards stay unchanged. Self attention reads its mask and its attention
function from keyword arguments (``kernels/hf/self_attention.py``). A cross-attention layer becomes
a subclass of its class, which replaces them by those for visual tokens. For the backward pass it
can save only the visual tokens (LV-XAttn §3.3). Without the arguments the layer behaves as before.

A cross-attention layer is recognized by its structure: it has ``q_proj``, ``k_proj`` and
``v_proj``, and its forward takes ``hidden_states`` and one of :data:`VISUAL_ARGUMENTS`. A trial on
a few tokens checks that it computes the same as before, before anything runs.

Legend: ``B`` sequences, ``Hq`` query heads, ``Hk`` key heads, ``T`` text tokens and ``V`` visual
tokens of this process, ``D`` head dim.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from raymm.errors import ForwardLeft, ModelError
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import (
    context_attention,
    current_autocast,
    recomputed_context_attention,
)
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.self_attention import ATTEND_ARGUMENT, MASK_ARGUMENT, NAME, can_use, register
from raymm.kernels.mask import patterns as mask_patterns
from raymm.kernels.mask.mask import AttentionMask

VISUAL_ARGUMENTS = ("cross_attention_states", "key_value_states")
"""Argument names for the tokens that give keys and values: Mllama's, then most other models'."""
CROSS_ARGUMENT = "raymm_cross"
"""Keyword argument of a model's forward: a :class:`CrossAttention`."""

MethodChooser = Callable[..., str]
"""``choose(group, masks, query, key, recompute=) -> method``; must agree on all processes.
``raymm.actors.sharding.visual_tokens.LeastBytes`` is one."""
_HIDDEN = "hidden_states"
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_TRIED_TOKENS = 3, 2  # text and visual
_NOISE = 2e-2  # relative; a real error is about as large as the result


@dataclass(frozen=True)
class CrossAttention:
    """Argument of cross-attention layers.

    It passes through the model's forward, so microbatches with different masks can be in flight at
    once, and a layer that is recomputed in the backward pass gets the same argument.

    Attributes:
        group: its queries are text tokens, its keys visual tokens.
        masks: (T, V), one per sequence or one for all.
        method: one of ``context_parallel.METHODS``, or a function that chooses one.
        recompute: save the visual tokens, which all layers share, instead of each layer's queries,
            keys and values, and recompute these in the backward pass.
    """

    group: ContextGroup
    masks: tuple[AttentionMask, ...]
    method: str | MethodChooser = "rotate"
    recompute: bool = False


def chosen(
    method: str | MethodChooser, group: ContextGroup, masks: Sequence[AttentionMask],
    query: torch.Tensor, key: torch.Tensor, recompute: bool = False,
) -> str:  # fmt: skip
    """Return ``method`` if it is a name, else the name that it chooses for query (B, Hq, Tq, D) and
    key (B, Hk, Tk, D). ``recompute`` is True if keys and values are recomputed in backward."""
    if isinstance(method, str):
        return method
    return method(group, tuple(masks), query, key, recompute=recompute)


def share_cross_attention(model: nn.Module) -> tuple[str, ...]:
    """Make a model's cross attention accept :data:`CROSS_ARGUMENT`, and switch all attention of its
    text model to raymm's. May be called again.

    Returns:
        Names of the cross-attention layers.

    Raises:
        ModelError: the model has no cross attention, or a layer that looks like cross attention has
            an unsupported structure or fails the trial.
    """
    if not can_use(model):
        raise ModelError(
            f"{type(model).__name__} does not take its attention from transformers' "
            "AttentionInterface"
        )
    register()
    layers = {
        name: module for name, module in model.named_modules() if _visual_argument(type(module))
        and all(
            isinstance(getattr(module, projection, None), nn.Module)
            for projection in _PROJECTIONS
        )
    }  # fmt: skip
    suspects = [
        name for name, module in model.named_modules() if _looks_like_cross_attention(module)
        and not any(f"{layer_name}.".startswith(f"{name}.") for layer_name in layers)
    ]  # fmt: skip
    if suspects:
        innermost = suspects[-1]
        kind = type(model.get_submodule(innermost)).__name__
        raise ModelError(
            f"{innermost} ({kind}) is an unsupported kind of cross attention; accepted: layers "
            f"with {', '.join(_PROJECTIONS)} whose forward takes {_HIDDEN} and one of "
            f"{', '.join(VISUAL_ARGUMENTS)}"
        )
    if not layers:
        raise ModelError(
            f"{type(model).__name__} has no cross attention: no layer with "
            f"{', '.join(_PROJECTIONS)} takes one of {', '.join(VISUAL_ARGUMENTS)}"
        )
    previous = {m: (type(m), _config(m)._attn_implementation) for m in layers.values()}
    try:
        for name, module in layers.items():
            _attend_by(module, NAME)
            module.__class__ = _shared_class(type(module))
            _try(name, module)
    except ModelError:
        for module, (kind, implementation) in previous.items():
            _attend_by(module, implementation)
            module.__class__ = kind
        raise
    return tuple(layers)


def _looks_like_cross_attention(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return "cross" in kind and "attention" in kind


def _attend_by(layer: nn.Module, implementation: str) -> None:
    """Set the implementation in the layer's config, but not in sub-configs (vision towers)."""
    _config(layer)._attn_implementation = {"": implementation}


def _config(layer: nn.Module) -> Any:
    return layer.config


class _SharedCrossAttention(nn.Module):
    """First base of the classes of converted layers; the second base is the layer's class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's forward, attending to the visual tokens of all processes."""
        cross: CrossAttention | None = kwargs.pop(CROSS_ARGUMENT, None)
        if cross is None:
            return super().forward(*args, **kwargs)
        arguments = _by_name(super().forward, args, kwargs)
        name = _visual_argument(type(self))
        if name is None or arguments.get(name) is None:  # the class does self attention, too
            return super().forward(**arguments)
        if arguments.get("past_key_values") is not None:
            raise ModelError("shared cross attention supports no KV cache; set use_cache=False")
        tokens = cross.group.keys.sizes[cross.group.rank]
        arguments[name] = _visual_tokens(arguments[name], arguments[_HIDDEN].shape[0], tokens)
        arguments[MASK_ARGUMENT] = cross.masks
        arguments.pop(ATTEND_ARGUMENT, None)  # set for self attention
        recompute = cross.recompute and torch.is_grad_enabled()
        attended = []

        def attend(query, key, value, masks, **options):
            attended.append(True)
            projected = query, key[:, :, :tokens], value[:, :, :tokens]
            method = chosen(cross.method, cross.group, masks, *projected[:2], recompute)
            call = ContextCall(cross.group, masks, **options)
            if not recompute:
                return context_attention(*projected, call, method=method)
            torch.set_grad_enabled(True)
            return recomputed_context_attention(
                project, hidden, arguments[name], call, method=method, projected=projected
            )

        if not recompute:
            out = super().forward(**arguments, **{ATTEND_ARGUMENT: attend})
        else:
            # Autograd records the layer up to its attention as a single function of hidden states
            # and visual tokens.
            hidden = arguments[_HIDDEN]
            replaced = (_HIDDEN, name, "attention_mask")
            remaining = {k: v for k, v in arguments.items() if k not in replaced}
            project = _Projections(self, partial(super().forward, **remaining), name, tokens)
            with torch.no_grad(), current_autocast(hidden.device.type)():
                out = super().forward(**arguments, **{ATTEND_ARGUMENT: attend})
        if not attended:
            raise ModelError(
                f"{type(self).__name__} did not attend through transformers' AttentionInterface; "
                f"expected attn_implementation {NAME!r}, its config has "
                f"{_config(self)._attn_implementation!r}"
            )
        return out


class _Projections(nn.Module):
    """A layer up to its attention: ``(hidden (B, T, ...), visual (B, V, ...)) -> query (B, Hq, T,
    D), key and value (B, Hk, V, D)``."""

    def __init__(self, layer: nn.Module, forward: Any, visual_argument: str, tokens: int) -> None:
        super().__init__()
        self.layer, self.run = layer, forward
        self.visual_argument, self.tokens = visual_argument, tokens

    def forward(self, hidden: torch.Tensor, visual: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the layer until it calls its attention function."""

        def attend(query, key, value, *_, **__):
            raise ForwardLeft((query, key[:, :, : self.tokens], value[:, :, : self.tokens]))

        inputs = {_HIDDEN: hidden, self.visual_argument: visual, "attention_mask": None}
        if "attention_mask" not in _parameters(type(self.layer)):
            del inputs["attention_mask"]
        try:
            self.run(**inputs, **{ATTEND_ARGUMENT: attend})
        except ForwardLeft as reached:
            return reached.value
        raise ModelError(f"{type(self.layer).__name__} did not attend through AttentionInterface")


@cache
def _shared_class(plain: type) -> type:
    if issubclass(plain, _SharedCrossAttention):
        return plain
    return type(plain.__name__, (_SharedCrossAttention, plain), {"__doc__": plain.__doc__})


@cache
def _parameters(kind: type) -> frozenset[str]:
    """Return the parameter names of the forward of a layer's original class."""
    plain = kind.__bases__[1] if issubclass(kind, _SharedCrossAttention) else kind
    return frozenset(inspect.signature(plain.forward).parameters)


def _visual_argument(kind: type) -> str | None:
    parameters = _parameters(kind)
    if _HIDDEN not in parameters:
        return None
    return next((name for name in VISUAL_ARGUMENTS if name in parameters), None)


def _by_name(forward: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    signature = inspect.signature(forward)
    arguments = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(parameter.name, {})
    return arguments


def _visual_tokens(visual: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Reshape visual tokens, (B, V, ...) or (B * tiles, patches, ...), to (B, V, ...). A process
    without visual tokens passes one placeholder token."""
    visual = visual.reshape(batch, -1, visual.shape[-1])
    if visual.shape[1] != max(tokens, 1):
        raise ModelError(
            f"cross attention got {visual.shape[1]} visual tokens per sequence; expected "
            f"{max(tokens, 1)} from the layout of this process"
        )
    return visual


class Alone(NamedTuple):
    """An exchange of one process."""

    rank: int = 0
    size: int = 1


@torch.enable_grad()
def _try(name: str, layer: nn.Module) -> None:
    """Compare outputs and gradients of a layer with and without recomputation, on a few tokens."""
    first = next(layer.parameters())
    options = {"device": first.device, "dtype": first.dtype}
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(1, tokens, cast(nn.Linear, projection).in_features, generator=generator)
        .to(**options).requires_grad_()
        for tokens, projection in zip(_TRIED_TOKENS, (layer.q_proj, layer.k_proj), strict=True)
    ]  # fmt: skip
    texts, visuals = (ContextLayout.even(tokens, 1) for tokens in _TRIED_TOKENS)
    masks = (mask_patterns.full(*_TRIED_TOKENS),)
    group = ContextGroup(cast(Exchange, Alone()), texts, visuals)
    visual = _visual_argument(type(layer))
    assert visual is not None  # share_cross_attention selects only such layers
    arguments: dict[str, Any] = dict(zip((_HIDDEN, visual), inputs, strict=True))
    if "attention_mask" in _parameters(type(layer)):
        arguments["attention_mask"] = None
    leaves = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    results, was_training = [], layer.training
    layer.eval()
    try:
        for recompute in (False, True):
            mask_arguments: dict[str, Any] = {
                CROSS_ARGUMENT: CrossAttention(group, masks, recompute=recompute)
            }
            if not recompute:
                mask_arguments = {MASK_ARGUMENT: masks}
            out = layer(**arguments, **mask_arguments)
            out = out[0] if isinstance(out, tuple) else out
            gradients = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
            results.append((out.detach(), *gradients))
    except Exception as error:
        raise ModelError(
            f"cannot split the tokens of {name} ({type(layer).__name__}) over processes: {error}"
        ) from error
    finally:
        layer.train(was_training)
    if not all(_alike(result, second) for result, second in zip(*results, strict=True)):
        raise ModelError(
            f"cannot split the tokens of {name} ({type(layer).__name__}) over processes: it uses "
            "hidden states or visual tokens for more than queries, keys and values"
        )


def _alike(result: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if result is None or other is None:
        return result is other
    result, other = result.double(), other.double()
    return bool((result - other).norm() <= _NOISE * result.norm())
