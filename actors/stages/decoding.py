"""What stages of a language model need to write text: keys and values of the tokens before, and the
likeliest next token.

A stage keeps keys and values of its own blocks. Of the others' the model's forward only asks how
many tokens there were, of whichever block it looks at: theirs are of one number per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.generic import ModelOutput

from raymm.actors.modules.message import Decode
from raymm.kernels.collectives.tensor_group import TensorGroup


class KeyValueCaches:
    """Of every text that is under way.

    Args:
        config: of the model, which says of which kind each block's cache is; None: all are of full
            attention, as in a model that is not one of transformers.
        lo, hi: the stage's blocks.
    """

    def __init__(self, config: PretrainedConfig | None, lo: int, hi: int) -> None:
        self._config, self._blocks = config, range(lo, hi)
        self._of_text: dict[int, DynamicCache] = {}

    @contextmanager
    def arguments(self, decode: Decode | None, tokens: int) -> Iterator[dict[str, Any]]:
        """What the model's forward is told, for the length of a block.

        Args:
            decode: which text the tokens are of; None: of none. In training, and with a first text,
                whatever there was has ended.
            tokens: of the forward.
        """
        if torch.is_grad_enabled() or decode is not None and decode.first and not decode.text:
            self._of_text.clear()
        if decode is None:
            yield {"use_cache": False}
            return
        for text in decode.ended:
            self._of_text.pop(text, None)
        if decode.first:
            self._of_text[decode.text] = DynamicCache(config=self._config)
        cache = self._of_text[decode.text]
        try:
            yield {"use_cache": True, "past_key_values": cache}
        finally:
            nothing = torch.zeros(1, 1, tokens, 1)
            for block, layer in enumerate(cache.layers):
                # A layer of linear attention alone counts no tokens.
                if block not in self._blocks and isinstance(layer, CacheLayerMixin):
                    layer.update(nothing, nothing)


class PreparedInputs:
    """What a whole model's forward is given of the texts that are under way: its own functions say,
    as transformers' ``generate`` calls them. They know what positions tokens after images have,
    and that items are seen once.

    Args:
        model: one of transformers, or a stage's part of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        self._of_text: dict[int, tuple[torch.Tensor, dict[str, Any]]] = {}

    def arguments(
        self, decode: Decode, inputs: Mapping[str, Any], caching: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of the forward of a text's tokens.

        Args:
            decode: which text they are of.
            inputs: at first all that the model is given, then ``input_ids`` (1, t) alone count.
            caching: of :meth:`KeyValueCaches.arguments`.
        """
        for text in decode.ended:
            self._of_text.pop(text, None)
        model, ids, tokens = self._model, inputs["input_ids"], None
        if decode.first:
            options = {**{n: v for n, v in inputs.items() if n != "input_ids"}, **caching}
            if "position_ids" not in options and "position_ids" in self._parameters():
                own = {name: value for name, value in options.items() if name not in caching}
                options["position_ids"] = model._prepare_position_ids_for_generation(ids, own)
        else:
            before, options = self._of_text[decode.text]
            tokens, ids = ids.shape[1], torch.cat([before, ids], dim=1)
            options = model._update_model_kwargs_for_generation(
                ModelOutput(), {**options, **caching}, num_new_tokens=tokens
            )
        self._of_text[decode.text] = ids, options
        return model.prepare_inputs_for_generation(
            ids, next_sequence_length=tokens, is_first_iteration=decode.first, **options
        )

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._model.forward).parameters


def likeliest(
    logits: torch.Tensor, start: int = 0, group: TensorGroup | None = None
) -> torch.Tensor:
    """The token with the largest logit; of several the first.

    Args:
        logits: (V,), or columns from ``start`` on of a vocabulary that is split over a group.
        start: this member's first column.
        group: the members; None for one alone.

    Returns:
        Scalar float64, the same on all members.
    """
    if group is None:
        return logits.argmax().double()
    top = logits.float().amax() if len(logits) else logits.new_tensor(-torch.inf).float()
    best = group.all_reduce_max(top.clone())
    own = start + logits.argmax() if len(logits) and top == best else torch.tensor(torch.inf)
    return -group.all_reduce_max(-own.double().to(logits.device))
