"""Probe of the loss that a mixture of experts adds for its routers.

A small copy runs with labels. Its loss must be the next-token cross entropy of its logits, plus, if
its config enables ``output_router_logits``, the :class:`RouterLoss` of its routers' outputs for
some number of experts per token and one of the config's numbers as coefficient. Other models are
rejected. For models without that switch see :mod:`raymm.actors.probe.experts.own_loss`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from raymm.actors.experts.router_loss import Mixture, RouterLoss
from raymm.actors.experts.routing import SWITCH, configs_of, experts, routers, switched_on
from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.brief_error import because
from raymm.actors.probe.cut import of_one_that_runs, small_language_model
from raymm.actors.probe.experts.own_loss import check_own_loss, cross_entropy
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.vlm.towers import as_copied
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

_TOKENS, _PADDING = 12, 5
_TOLERANCE = 1e-4  # relative, for a loss computed in another order
_ROUNDING = 2e-6
_OWN_ROUNDING = 1e-5  # relative, for a loss without additions
_SWITCH_OFF = "switch it off in the model's config (output_router_logits: false)"
_IGNORE = (
    ", or leave it out knowingly: model.router_loss: ignore in a configuration, "
    "MultimodalModule(..., router_loss='ignore')"
)


@plain_torch()
def mixture_of(
    source: ModuleSource, example: Mapping[str, Any] | None = None, ignore: bool = False
) -> Mixture | None:
    """Return a model's mixture-of-experts settings; None for a dense model.

    Args:
        example: inputs of a Hugging Face VLM's forward; None for a language model.
        ignore: ignore the loss that the model adds.

    Raises:
        ProbeError: the model's loss is not the cross entropy of its logits, plus the
            :class:`RouterLoss` if its config enables that.
    """
    skeleton = source.skeleton()
    is_mixture = bool(experts(skeleton) or routers(skeleton))
    if ignore or (example is None and not switched_on(skeleton)):
        return Mixture() if is_mixture else None
    kinds = {type(config) for config in switched_on(skeleton)}
    if example is None:
        model = small_language_model(source)
        loss = _fitted(model, _text(model), kinds, _SWITCH_OFF + _IGNORE)
    else:
        loss = of_one_that_runs(source, partial(_of_whole, source, example, kinds))
    return Mixture(loss) if is_mixture or loss is not None else None


def _of_whole(
    source: ModuleSource, example: Mapping[str, Any], kinds: Collection[type], model: nn.Module
) -> RouterLoss | None:
    inputs = as_copied(source, model, example)
    if kinds:
        return _fitted(model, inputs, kinds, _SWITCH_OFF)
    check_own_loss(model.train(), inputs, "Switch off the other terms in its config")
    return None


def _text(model: nn.Module) -> dict[str, torch.Tensor]:
    vocabulary = input_embeddings(model).weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, _TOKENS), generator=generator)
    real = torch.ones_like(ids)
    real[1, -_PADDING:] = 0
    return {"input_ids": ids, "attention_mask": real}


def _fitted(
    model: nn.Module, inputs: Mapping[str, Any], kinds: Collection[type], cure: str
) -> RouterLoss | None:
    """Fit a router loss to a small copy, which is modified; None if it adds no loss.

    ``kinds`` are classes of configs that enable the loss; ``cure`` is advice for the error message.

    Raises:
        NotRunError: the model does not run on the inputs.
        ProbeError: the model adds another loss.
    """
    for config in configs_of(model):
        if type(config) in kinds and hasattr(config, SWITCH):
            setattr(config, SWITCH, True)
    logits: list[torch.Tensor] = []
    hooks = [
        router.module.register_forward_hook(partial(_note, logits, router.index))
        for router in routers(model)
    ]
    ids = inputs["input_ids"]
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            output: Any = model(**inputs, labels=ids, use_cache=False)
    except USER_CODE_RAISES as error:  # whatever a module may raise
        raise NotRunError(
            f"{type(model).__name__} does not run with labels{because(error)}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    loss, entropy = float(output.loss), cross_entropy(output.logits, ids)
    added = getattr(output, "aux_loss", None)
    added = float(added) if isinstance(added, torch.Tensor) else loss - entropy
    if abs(added) <= _ROUNDING * loss and abs(loss - entropy) <= _OWN_ROUNDING * loss:
        return None
    real = inputs.get("attention_mask")
    real = None if real is None else real.flatten().bool()
    for fitted in _candidates(model, logits, ids.numel()):
        value = float(fitted.part(fitted.of(logits, real)))
        if abs(value - added) > _TOLERANCE * abs(added):
            continue
        for coefficient in _coefficients(model):
            due = entropy + coefficient * value
            if abs(loss - due) <= _ROUNDING * max(loss, due):
                return replace(fitted, coefficient=coefficient) if coefficient else None
    raise ProbeError(
        f"{type(model).__name__} adds aux_loss {added:.4g} to its loss (in a trial {loss:.4g}, "
        f"where the cross entropy of its logits is {entropy:.4g}), which is neither the routers' "
        "loss of the Switch Transformer over all layers nor that loss times a coefficient in its "
        f"config; {cure}"
    )


def _note(
    logits: list[torch.Tensor], index: int, module: nn.Module, args: Any, output: Any
) -> None:
    logits.append(output[index] if isinstance(output, tuple) else output)


def _candidates(
    model: nn.Module, logits: list[torch.Tensor], tokens: int
) -> Iterator[RouterLoss]:
    sizes = {layer_logits.shape[-1] for layer_logits in logits}
    rows = {layer_logits.numel() // layer_logits.shape[-1] for layer_logits in logits}
    if len(sizes) != 1 or rows != {tokens}:
        return
    (count,) = sizes
    for top_k in range(1, count + 1):
        yield RouterLoss(count, top_k, 1.0)


def _coefficients(model: nn.Module) -> list[float]:
    """Return possible coefficients of the loss, the largest first."""
    return sorted({*_loss_numbers(getattr(model, "config", None))}, reverse=True)


def _loss_numbers(config: Any) -> Iterator[float]:
    """Yield numbers of a config and its parts whose names contain "loss"."""
    if not isinstance(config, PretrainedConfig):
        return
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from _loss_numbers(value)
        elif "loss" in name and isinstance(value, float | int) and value >= 0:
            yield float(value)
