"""Text generation for stages of a language model: key-value caches and greedy decoding.

A stage stores only the keys and values of its blocks. For blocks of other stages the model's
forward needs only the token count, from an arbitrary block; their caches hold one number per token.

Each text has a separate cache. The caches of several texts are joined for a step
(:class:`JoinedCache`), so texts may start and end at any time. Shorter texts are padded on the
left, as in a batch of transformers' ``generate``. The batch is rebuilt in every step, at no extra
cost: growing caches of transformers are copied in every step anyway.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import ModelOutput

from raymm.actors.modules.message import Decode, Message, MicrobatchContext
from raymm.errors import ModelError
from raymm.kernels.collectives.tensor_group import TensorGroup

CACHE, SEEN, POSITIONS = "past_key_values", "attention_mask", "position_ids"
IDS = "input_ids"
_APART = "the model cannot continue several texts at once"


class JoinedLayer(DynamicLayer):
    """Keys and values of one block, with a row per text."""

    def __init__(self, layers: Sequence[DynamicLayer]) -> None:
        self._layers = layers
        super().__init__()
        self._longest = max(layers, key=lambda layer: layer.get_seq_length())
        self.is_initialized, self.is_sliding = True, layers[0].is_sliding
        self.dtype, self.device = layers[0].dtype, layers[0].device

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append (texts, heads, 1, width) to each text's cache; return all (texts, heads, T,
        width)."""
        rows = zip(self._layers, key_states.split(1), value_states.split(1), strict=True)
        updated = [layer.update(key, value, *args, **kwargs) for layer, key, value in rows]
        keys, values = (_behind_padding(states, 2) for states in zip(*updated, strict=True))
        return keys, values

    @property
    def keys(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stored keys. Some models read those of other blocks."""
        return self._kept([layer.keys for layer in self._layers])

    @keys.setter
    def keys(self, value: Any) -> None:
        """Ignore the value: each text stores its own keys."""

    @property
    def values(self) -> torch.Tensor | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Stored values."""
        return self._kept([layer.values for layer in self._layers])

    @values.setter
    def values(self, value: Any) -> None:
        """Ignore the value: each text stores its own values."""

    @staticmethod
    def _kept(of_texts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [value for value in of_texts if value is not None]
        return _behind_padding(present, 2) if len(present) == len(of_texts) else None

    def get_seq_length(self, *args: Any) -> int:
        """Return the token count, with padding."""
        return self._longest.get_seq_length(*args)

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """Return the mask sizes, with padding."""
        return self._longest.get_mask_sizes(*args)


class JoinedCache(Cache):
    """Key-value cache with a row per text."""

    def __init__(self, of_texts: Sequence[DynamicCache]) -> None:
        self.of_texts = of_texts
        layers = zip(*(cache.layers for cache in of_texts), strict=True)
        super().__init__(layers=[JoinedLayer(block_layers) for block_layers in layers])


def check_joins(caches: Sequence[DynamicCache], module: nn.Module) -> None:
    """Raise if the caches of several texts cannot be joined.

    Raises:
        ModelError: blocks cache something other than keys and values per token; the model does not
            accept token positions, or has no rotary embeddings (such models count positions in
            their own way); or the longest text would change how all positions are rotated.
    """
    for cache in caches:
        # Exact types: subclasses store more, and other layers have no length.
        if any(
            type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in cache.layers
        ):
            raise ModelError(_APART)
        if len({cast(DynamicLayer, layer).get_seq_length() for layer in cache.layers}) != 1:
            raise ModelError(_APART)
    takes_both = {SEEN, POSITIONS} <= set(inspect.signature(module.forward).parameters)
    if not takes_both or not any(name.endswith("inv_freq") for name, _ in module.named_buffers()):
        raise ModelError(_APART)
    lengths = {cache.get_seq_length() for cache in caches}
    if len(lengths) > 1 and max(lengths) >= _rotated_alike(module):
        raise ModelError(_APART)


def _rotated_alike(module: nn.Module) -> float:
    """Return the length above which ``dynamic_rope_update`` rotates all positions differently."""
    alike = math.inf
    for rotary in module.modules():
        kinds: Any = getattr(rotary, "rope_type", None)
        for layers, kind in (kinds if isinstance(kinds, Mapping) else {None: kinds}).items():
            if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope"):
                config: Any = rotary.config
                rope = config.rope_parameters if layers is None else config.rope_parameters[layers]
                longest = config.max_position_embeddings
                alike = min(alike, rope.get("original_max_position_embeddings", longest))
    return alike


def seen_tokens(
    caches: Sequence[DynamicCache], tokens: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Return mask (texts, T) and positions (texts, tokens), int64, for ``tokens`` new ones per
    text.

    Texts of equal length need neither; then the result is empty.
    """
    lengths = torch.tensor([cache.get_seq_length() for cache in caches])
    if bool((lengths == lengths[0]).all()):
        return {}
    total = int(lengths.max()) + tokens
    seen = torch.arange(total) >= (total - tokens - lengths)[:, None]
    positions = lengths[:, None] + torch.arange(tokens)
    return {SEEN: seen.long().to(device), POSITIONS: positions.to(device)}


def joined_arguments(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the forward arguments of single texts into a batch, as transformers' ``generate`` has
    it.

    Tensors of rows and items are concatenated; tensors of tokens are padded on the left first.
    Caches are ignored.

    Raises:
        ModelError: an argument cannot be joined, or the model derives positions from its cache.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    joined = {name: _joined(name, rows) for name in names if name != CACHE}
    if joined.get(SEEN) is None or joined.get(POSITIONS) is None:
        raise ModelError(_APART)
    return joined


def _joined(name: str, rows: Sequence[Mapping[str, Any]]) -> Any:
    having = [row for row in rows if row.get(name) is not None]
    values = [row[name] for row in having]
    if not values:
        return None
    first = values[0]
    if not all(isinstance(value, torch.Tensor) for value in values):
        if len(values) == len(rows) and isinstance(first, int) and set(values) == {first}:
            return first
        raise ModelError(_APART)
    if name == POSITIONS and all(value.shape[1:] == (1, 1) for value in values):
        return torch.cat(values, 1)  # positions in several dimensions
    widths = [row[SEEN].shape for row in rows if row.get(SEEN) is not None]
    if [value.shape for value in values] == widths:
        return _behind_padding(values, 1)
    if any(value.shape[1:] != first.shape[1:] for value in values):
        raise ModelError(_APART)
    if len(having) < len(rows) and first.shape == having[0][IDS].shape:
        raise ModelError(_APART)  # token argument that only some texts have
    return torch.cat(values)


def _behind_padding(values: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate tensors (1, ...), each padded on the left of ``dim`` to the longest."""
    longest = max(value.shape[dim] for value in values)
    trailing_dims = values[0].dim() - 1 - dim
    return torch.cat([
        F.pad(value, (0, 0) * trailing_dims + (longest - value.shape[dim], 0)) for value in values
    ])


def apart_if_need_be(run: Callable[..., Message]) -> Callable[..., Message]:
    """Wrap a stage's ``run``: texts that cannot be joined run one after the other.

    ``run`` must raise :class:`ModelError` before any block has run.
    """

    @wraps(run)
    def runs(
        stage: Any, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        try:
            return run(stage, inputs, received, context)
        except ModelError as error:
            decode = context.decode
            if decode is None or error.args != (_APART,):
                raise
        messages = []
        for row, text in enumerate(decode.texts):
            row_messages = {
                name: message._replace(
                    tensors=tuple(tensor[row : row + 1] for tensor in message.tensors),
                    side=_row(message.side, row),
                )
                for name, message in received.items()
            }
            alone = context._replace(decode=Decode((text,), False))
            messages.append(run(stage, inputs and _row(inputs, row), row_messages, alone))
        return _of_rows(messages)

    return runs


def _row(values: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {
        name: value[row : row + 1] if isinstance(value, torch.Tensor) else value
        for name, value in values.items()
    }


def _of_rows(messages: Sequence[Message]) -> Message:
    """Concatenate the messages of single texts: hidden states and next tokens."""
    sides = [message.side for message in messages]
    scores = [message.scores for message in messages if message.scores is not None]
    return messages[0]._replace(
        tensors=tuple(torch.cat(rows) for rows in zip(*(m.tensors for m in messages), strict=True)),
        side={name: torch.cat([side[name] for side in sides]) for name in sides[0]},
        scores=torch.cat(scores) if scores else None,
    )


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
