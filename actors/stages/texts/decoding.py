"""What stages of a language model need to write text: keys and values of the tokens before, and the
likeliest next token.

A stage keeps keys and values of its own blocks. Of the others' the model's forward only asks how
many tokens there were, of whichever block it looks at: theirs are of one number per token.

Each text has keys and values of its own. Those of several are put together for a step
(:mod:`raymm.actors.stages.texts.joined_texts`), so texts may begin and end whenever they do.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin
from transformers.utils.generic import ModelOutput

from raymm.actors.modules.message import Decode
from raymm.actors.stages.texts.joined_texts import (
    CACHE,
    JoinedCache,
    check_joins,
    joined_arguments,
    seen_tokens,
)
from raymm.errors import ModelError
from raymm.kernels.collectives.tensor_group import TensorGroup


class KeyValueCaches:
    """Of every text that is under way.

    Args:
        module: the model, or a stage's part of it; its config says of which kind each block's cache
            is. Without one all are of full attention.
        lo, hi: the stage's blocks.
    """

    def __init__(self, module: nn.Module, lo: int, hi: int) -> None:
        self._config: PretrainedConfig | None = getattr(module, "config", None)
        self._module, self._blocks = module, range(lo, hi)
        self._of_text: dict[int, DynamicCache] = {}

    @contextmanager
    def arguments(self, decode: Decode | None, tokens: int) -> Iterator[dict[str, Any]]:
        """What the model's forward is told, for the length of a block.

        Args:
            decode: which texts the tokens are of; None: of none. In training, and with a first
                text, whatever there was has ended.
            tokens: of the forward, in each row.

        Raises:
            ModelError: the model cannot go on with several texts at once.
        """
        first = decode is not None and decode.first
        if torch.is_grad_enabled() or decode is not None and first and decode.texts == (0,):
            self._of_text.clear()
        if decode is None:
            yield {"use_cache": False}
            return
        for text in decode.ended:
            self._of_text.pop(text, None)
        if first:
            self._of_text[decode.texts[0]] = DynamicCache(config=self._config)
        caches = [self._of_text[text] for text in decode.texts]
        if len(caches) == 1:
            arguments = {CACHE: caches[0]}
        else:
            check_joins(caches, self._module)
            device = next(self._module.parameters()).device
            seen = seen_tokens(caches, tokens, device)
            arguments = {CACHE: JoinedCache(caches), **seen}
        ran = True
        try:
            yield {"use_cache": True, **arguments}
        except ModelError:
            ran = False
            raise
        finally:
            if ran:
                self._count_others(caches, tokens)

    def _count_others(self, caches: Sequence[DynamicCache], tokens: int) -> None:
        """Tokens that blocks of other stages have seen, too."""
        nothing = torch.zeros(1, 1, tokens, 1)
        for cache in caches:
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
        # As long as a text's keys and values are there, which :class:`KeyValueCaches` ends.
        self._of_text: WeakKeyDictionary[
            DynamicCache, tuple[torch.Tensor, dict[str, Any]]
        ] = WeakKeyDictionary()

    def arguments(
        self, decode: Decode, inputs: Mapping[str, Any], caching: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Arguments of the forward of texts' tokens.

        Args:
            decode: which texts they are of.
            inputs: at first all that the model is given, then ``input_ids`` (texts, t) alone count.
            caching: of :meth:`KeyValueCaches.arguments`.

        Raises:
            ModelError: the model is not to be given several texts at once.
        """
        cache = caching[CACHE]
        if len(decode.texts) == 1:
            return self._of_one(decode.first, inputs, caching)
        before = {own: self._of_text[own] for own in cache.of_texts}
        rows = [
            self._of_one(False, {"input_ids": ids}, {"use_cache": True, CACHE: own})
            for own, ids in zip(cache.of_texts, inputs["input_ids"].split(1), strict=True)
        ]
        try:
            return {**joined_arguments(rows), CACHE: cache}
        except ModelError:
            self._of_text.update(before)
            raise

    def _of_one(
        self, first: bool, inputs: Mapping[str, Any], caching: Mapping[str, Any]
    ) -> dict[str, Any]:
        model, ids, tokens = self._model, inputs["input_ids"], None
        if first:
            options = {**{n: v for n, v in inputs.items() if n != "input_ids"}, **caching}
            if "position_ids" not in options and "position_ids" in self._parameters():
                own = {name: value for name, value in options.items() if name not in caching}
                options["position_ids"] = model._prepare_position_ids_for_generation(ids, own)
        else:
            before, options = self._of_text[caching[CACHE]]
            tokens, ids = ids.shape[1], torch.cat([before, ids], dim=1)
            options = model._update_model_kwargs_for_generation(
                ModelOutput(), {**options, **caching}, is_encoder_decoder=False,
                num_new_tokens=tokens,
            )
        kept = {name: value for name, value in options.items() if name not in caching}
        self._of_text[caching[CACHE]] = ids, kept
        return model.prepare_inputs_for_generation(
            ids, next_sequence_length=tokens, is_first_iteration=first, **options
        )

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._model.forward).parameters


def likeliest(
    logits: torch.Tensor, start: int = 0, group: TensorGroup | None = None
) -> torch.Tensor:
    """Of every text the token with the largest logit; of several the first.

    Args:
        logits: (texts, V), or columns from ``start`` on of a vocabulary that is split over a group.
        start: this member's first column.
        group: the members; None for one alone.

    Returns:
        (texts,) float64, the same on all members.
    """
    if group is None:
        return logits.argmax(-1).double()
    none = logits.new_full((len(logits),), -torch.inf, dtype=torch.float64)
    top = logits.double().amax(-1) if logits.shape[-1] else none
    best = group.all_reduce_max(top.clone())
    if logits.shape[-1]:
        none = torch.where(top == best, -(start + logits.argmax(-1)).double(), none)
    return -group.all_reduce_max(none)
