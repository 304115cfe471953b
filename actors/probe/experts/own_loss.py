"""Probe of a model's own loss.

raymm trains with the next-token cross entropy of a model's logits. A small copy runs with labels in
training mode, and the loss that its class computes must be that cross entropy. Classes without a
``labels`` parameter or ``loss`` output compute no loss.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.brief_error import brief
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.probe.cut import small_language_model
from raymm.actors.probe.history import check_history
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.probe.vlm.calls import run_model
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES, NotRunError, ProbeError

_TOKENS = 12
_ROUNDING = 1e-5  # relative tolerance for losses computed in different ways
_LABELS = "labels"


@plain_torch()
def check_language_loss(source: ModuleSource, ignore: bool) -> None:
    """Check the forward of a language model, and, unless ``ignore``, its own loss.

    Raises:
        ProbeError: the logits depend on earlier forwards; or see :func:`check_own_loss`.
    """
    try:
        model = small_language_model(source).train()
    except NotRunError:  # cannot be trained
        return
    with contextlib.suppress(NotRunError):  # fails on a text of another length
        check_history("llm", model, source.trains, _logits)
    if ignore:
        return
    vocabulary = input_embeddings(model).weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary, (2, _TOKENS), generator=generator)
    with contextlib.suppress(NotRunError):  # only accepts embeddings
        check_own_loss(
            model, {"input_ids": ids}, "Switch off the other terms in its config, or train with "
            "the next-token cross entropy knowingly: model.router_loss: ignore in a "
            "configuration, MultimodalModule(..., router_loss='ignore')",
        )


def _logits(model: nn.Module, other: bool) -> torch.Tensor:
    """Return the logits of one text, or of a longer one."""
    embeddings = input_embeddings(model)
    ids = torch.arange(2 * _TOKENS if other else _TOKENS)[None] % embeddings.weight.shape[0]
    return model(inputs_embeds=embeddings(ids), use_cache=False).logits.float()


def check_own_loss(model: nn.Module, inputs: Mapping[str, Any], cure: str) -> None:
    """Check that the loss of a small model's class is the next-token cross entropy of its logits.

    The model is in training mode; ``cure`` is advice for the error message, without a full stop.

    Raises:
        NotRunError: the model does not run on the inputs.
        ProbeError: it computes another loss, or its forward raises with labels.
    """
    name, ids = type(model).__name__, inputs["input_ids"]
    real = inputs.get("attention_mask")
    labels = ids
    if real is not None and real.shape == ids.shape:
        labels = ids.where(real.bool(), IGNORE_INDEX)
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if head is not None:  # image tokens may have embeddings but no logits
        labels = labels.where(labels < cast(nn.Linear, head).weight.shape[0], IGNORE_INDEX)

    def run(shown: Mapping[str, Any]) -> Any:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            return model(**copy.deepcopy(dict(shown)), use_cache=False)

    try:
        output = run({**inputs, _LABELS: labels})
    except USER_CODE_RAISES as error:  # whatever a model may raise
        run_model(model, inputs)
        if _LABELS not in inspect.signature(model.forward).parameters:
            return
        raise ProbeError(
            f"The forward of {name} takes labels, but fails with labels of the shape of input_ids "
            f"({brief(error)}), so its loss cannot be compared with the next-token cross entropy "
            f"of its logits, which raymm trains with. {cure}"
        ) from error
    loss, logits = getattr(output, "loss", None), getattr(output, "logits", None)
    if not isinstance(loss, torch.Tensor) or not (labels[:, 1:] != IGNORE_INDEX).any():
        return
    if not isinstance(logits, torch.Tensor) or logits.shape[:2] != labels.shape:
        raise ProbeError(
            f"{name} computes a loss, but returns no logits of shape "
            f"{(*labels.shape, 'vocabulary')}, whose next-token cross entropy raymm trains with"
        )
    due = cross_entropy(logits, labels)
    if _agree(float(loss), due):
        return

    def explains(entry: str) -> bool:
        """Return True if an input changes only the loss."""
        try:
            reduced = run({**{n: v for n, v in inputs.items() if n != entry}, _LABELS: labels})
        except USER_CODE_RAISES:  # whatever a model may raise
            return False
        return torch.equal(reduced.logits, logits) and _agree(float(reduced.loss), due)

    reads = [entry for entry in inputs if entry != "input_ids" and explains(entry)]
    if reads:
        cure = f"Only its own loss reads {', '.join(map(repr, reads))}; leave it out of the batch"
    raise ProbeError(
        f"The loss of {name} is not the next-token cross entropy of its logits, which raymm trains "
        f"with: in a trial its own loss is {float(loss):.8g}, and the cross entropy is {due:.8g}. "
        f"{_observations(output, labels)}{cure}"
    )


def _observations(output: Any, labels: torch.Tensor) -> str:
    """Return sentences that help to identify the model's loss."""
    same = F.cross_entropy(
        output.logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
    )
    if _agree(float(output.loss), float(same)):
        return (
            "Its own loss compares the logits of each token with the label of the same token, not "
            "of the next one. "
        )
    named = output if isinstance(output, Mapping) else vars(output)
    scalars = [
        f"{name} {float(value):.4g}" for name, value in named.items()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and name not in ("loss", "logits")
    ]  # fmt: skip
    return f"Its output has {', '.join(scalars)}. " if scalars else ""


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean next-token cross entropy of (rows, tokens, vocabulary) and (rows, tokens)
    int64."""
    return float(F.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE_INDEX
    ))  # fmt: skip


def _agree(loss: float, due: float) -> bool:
    return abs(loss - due) <= _ROUNDING * abs(due)
