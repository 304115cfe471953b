"""Text generation for stages of a language model: key-value caches and greedy decoding.

A stage stores only the keys and values of its blocks. For blocks of other stages the model's
forward needs only the token count, from an arbitrary block; their caches hold one number per token.

Each text has a separate cache. The caches of several texts are joined for a step
(:mod:`raymm.actors.stages.texts.joined_texts`), so texts may start and end at any time.
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
    """Key-value caches of all texts in progress, for blocks [lo, hi).

    The config of ``module`` determines the kind of each block's cache (default: full attention).
    """

    def __init__(self, module: nn.Module, lo: int, hi: int) -> None:
        self._config: PretrainedConfig | None = getattr(module, "config", None)
        self._module, self._blocks = module, range(lo, hi)
        self._of_text: dict[int, DynamicCache] = {}

    @contextmanager
    def arguments(self, decode: Decode | None, tokens: int) -> Iterator[dict[str, Any]]:
        """Context manager that yields the cache arguments of a forward with ``tokens`` per row.

        Args:
            decode: the texts of the tokens; None if the step does not decode. Training and a new
                text 0 clear all caches.

        Raises:
            ModelError: the model cannot continue several texts at once.
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
        """Add the new tokens to the token counts of other stages' blocks."""
        nothing = torch.zeros(1, 1, tokens, 1)
        for cache in caches:
            for block, layer in enumerate(cache.layers):
                # Layers with only linear attention count no tokens.
                if block not in self._blocks and isinstance(layer, CacheLayerMixin):
                    layer.update(nothing, nothing)


class PreparedInputs:
    """Forward inputs of a Hugging Face VLM for the texts in progress.

    They come from the model's own functions, called as transformers' ``generate`` calls them. These
    functions know the positions of tokens after images and pass items only once.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model: Any = model
        # Entries live as long as the text's cache, which is owned by :class:`KeyValueCaches`.
        self._of_text: WeakKeyDictionary[
            DynamicCache, tuple[torch.Tensor, dict[str, Any]]
        ] = WeakKeyDictionary()

    def arguments(
        self, decode: Decode, inputs: Mapping[str, Any], caching: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the forward's arguments for new tokens of texts.

        Args:
            inputs: for a new text all model inputs; later only ``input_ids`` (texts, t) is used.
            caching: from :meth:`KeyValueCaches.arguments`.

        Raises:
            ModelError: the model does not accept several texts at once.
        """
        cache = caching[CACHE]
        if len(decode.texts) == 1:
            return self._of_one(decode.first, inputs, caching)
        saved = {text_cache: self._of_text[text_cache] for text_cache in cache.of_texts}
        rows = [
            self._of_one(False, {"input_ids": ids}, {"use_cache": True, CACHE: text_cache})
            for text_cache, ids in zip(cache.of_texts, inputs["input_ids"].split(1), strict=True)
        ]
        try:
            return {**joined_arguments(rows), CACHE: cache}
        except ModelError:
            self._of_text.update(saved)
            raise

    def _of_one(
        self, first: bool, inputs: Mapping[str, Any], caching: Mapping[str, Any]
    ) -> dict[str, Any]:
        model, ids, tokens = self._model, inputs["input_ids"], None
        if first:
            options = {**{n: v for n, v in inputs.items() if n != "input_ids"}, **caching}
            if "position_ids" not in options and "position_ids" in self._parameters():
                passed = {name: value for name, value in options.items() if name not in caching}
                options["position_ids"] = model._prepare_position_ids_for_generation(ids, passed)
        else:
            earlier_ids, options = self._of_text[caching[CACHE]]
            tokens, ids = ids.shape[1], torch.cat([earlier_ids, ids], dim=1)
            options = model._update_model_kwargs_for_generation(
                ModelOutput(), {**options, **caching}, is_encoder_decoder=False,
                num_new_tokens=tokens,
            )
        model_options = {name: value for name, value in options.items() if name not in caching}
        self._of_text[caching[CACHE]] = ids, model_options
        return model.prepare_inputs_for_generation(
            ids, next_sequence_length=tokens, is_first_iteration=first, **options
        )

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self._model.forward).parameters


def likeliest(
    logits: torch.Tensor, start: int = 0, group: TensorGroup | None = None
) -> torch.Tensor:
    """Return (texts,) float64, the smallest token with the largest logit, identical on a group.

    Args:
        logits: (texts, V), or columns from ``start`` on of a vocabulary sharded over ``group``.
    """
    if group is None:
        return logits.argmax(-1).double()
    none = logits.new_full((len(logits),), -torch.inf, dtype=torch.float64)
    top = logits.double().amax(-1) if logits.shape[-1] else none
    best = group.all_reduce_max(top.clone())
    if logits.shape[-1]:
        none = torch.where(top == best, -(start + logits.argmax(-1)).double(), none)
    return -group.all_reduce_max(none)
