"""Trying whether a language model goes on with a text, in this process."""

from __future__ import annotations

import inspect
from itertools import pairwise

import torch
from transformers import DynamicCache

from raymm.actors.modules.blocks import input_embeddings
from raymm.actors.modules.brief_error import brief
from raymm.actors.probe.cut import small_language_model
from raymm.actors.probe.plain_torch import plain_torch
from raymm.actors.weights.source import ModuleSource
from raymm.errors import USER_CODE_RAISES

_IDS, _LAST = tuple(range(2, 10)), 2
# Of the largest logit.
_ALIKE = 1e-3


@plain_torch()
def why_not_written(source: ModuleSource) -> str | None:
    """Why a language model that is given embeddings, and keys and values of tokens before, gives
    other tokens than for all of them at once; None if it gives the same.

    Args:
        source: of the model. A small copy is tried.
    """
    model = small_language_model(source).eval()
    name = type(model).__name__
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return f"{name} takes no keys and values of tokens before (past_key_values)"
    embed, count = input_embeddings(model), len(_IDS)
    ids = torch.tensor([_IDS]) % embed.weight.shape[0]
    try:
        with torch.no_grad():
            whole = model(inputs_embeds=embed(ids), use_cache=False).logits
            cache = DynamicCache(config=getattr(model, "config", None))
            stops = range(count - _LAST, count + 1)
            for start, stop in pairwise((0, *stops)):
                logits = model(
                    inputs_embeds=embed(ids[:, start:stop]), use_cache=True, past_key_values=cache
                ).logits[0, -1]
                apart = float((logits - whole[0, stop - 1]).abs().max() / whole.abs().max())
                if not apart <= _ALIKE:
                    return (
                        f"{name} gives other logits for token {stop} from keys and values of those "
                        f"before than from all of them (by {apart:.1e} of the largest)"
                    )
    except USER_CODE_RAISES as error:  # whatever a model may raise
        return f"{name} does not go on from keys and values of tokens before: {brief(error)}"
    return None
