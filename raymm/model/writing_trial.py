"""Trial in this process of whether a language model can generate from cached keys and values."""

from __future__ import annotations

import copy
import inspect

import torch
from torch import nn

from raymm.actors.modules.blocks import input_embeddings, num_blocks
from raymm.actors.modules.brief_error import because
from raymm.actors.modules.merge import Prepend
from raymm.actors.modules.message import Decode, MicrobatchContext
from raymm.actors.probe.cut import small_language_model
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.stages.language import LanguageSpec, LanguageStage
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES
from raymm.model.module_kind import LANGUAGE_MODEL

# Two texts whose last tokens are generated; the second text is shorter.
_TEXTS, _LAST = (tuple(range(2, 10)), tuple(range(10, 15))), 2
# Tolerance relative to the largest logit.
_ALIKE = 1e-3


@plain_torch()
def why_not_written(source: ModuleSource) -> str | None:
    """Return why a language model cannot generate from embeddings and cached keys and values, or
    None.

    A small copy of the model is tried. It must compute the same logits as for all tokens at once,
    and must not mix up texts that take turns.
    """
    model = small_language_model(source).eval()
    name = type(model).__name__
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return f"{name} does not accept cached keys and values (past_key_values)"
    vocabulary = input_embeddings(model).weight.shape[0]
    texts = [torch.tensor([text]) % vocabulary for text in _TEXTS]
    try:
        with torch.no_grad():
            full_logits = [_at_once(copy.deepcopy(model), text) for text in texts]
            return _one_by_one(model, source, texts, full_logits)
    except USER_CODE_RAISES as error:  # whatever a model may raise
        return f"{name} cannot continue from cached keys and values{because(error)}"


def _at_once(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits (T, V) of all tokens in one forward."""
    logits = _Logits(model)
    model(inputs_embeds=input_embeddings(model)(ids), use_cache=False)
    return torch.stack(logits.rows)


def _one_by_one(
    model: nn.Module, source: ModuleSource, texts: list[torch.Tensor], whole: list[torch.Tensor]
) -> str | None:
    blocks, logits = num_blocks(model), _Logits(model)
    stage = LanguageStage(LanguageSpec(LANGUAGE_MODEL, source, blocks, Prepend()), 0, blocks, model)
    prompts = [(((n,), True), text[:, : -_LAST]) for n, text in enumerate(texts)]
    last_tokens = [torch.cat([text[:, -b, None] for text in texts]) for b in range(_LAST, 0, -1)]
    lengths = [0] * len(texts)
    for (numbers, first), ids in [*prompts, *((((0, 1), False), ids) for ids in last_tokens)]:
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "labels": torch.full_like(ids, -100), "sample_index": {},
        }
        logits.rows.clear()
        stage.run(inputs, {}, MicrobatchContext(1, decode=Decode(numbers, first)))
        for number, row in zip(numbers, logits.rows[-len(numbers) :], strict=True):
            lengths[number] += ids.shape[1]
            expected = whole[number]
            error = float((row - expected[lengths[number] - 1]).abs().max() / expected.abs().max())
            if not error <= _ALIKE:
                return (
                    f"{type(model).__name__} computes different logits for token {lengths[number]} "
                    f"from cached keys and values than from all tokens at once (by {error:.1e} of "
                    "the largest)"
                )
    return None


class _Logits:
    def __init__(self, model: nn.Module) -> None:
        self.rows: list[torch.Tensor] = []
        head = model.get_output_embeddings()  # type: ignore[operator]
        head.register_forward_hook(lambda *called: self.rows.extend(called[2].flatten(0, -2)))
