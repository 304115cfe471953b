"""Batches of several texts, each with its own key-value cache.

Shorter texts are padded on the left, as in a batch of transformers' ``generate``. The batch is
rebuilt in every step, at no extra cost: growing caches of transformers are copied in every step
anyway.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from raymm.actors.modules.message import Decode, Message, MicrobatchContext
from raymm.errors import ModelError

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
