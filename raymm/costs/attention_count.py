"""Counts of attention: modules, widths, and visible pairs of a query and a key.

Attention whose run was observed counts as observed. Otherwise, each block with an ``...Attention``
module has one self-attention over visible pairs: half of all pairs if causal, fewer with a sliding
window.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from raymm.actors.weights.model_part import is_within
from raymm.costs.load import HEADS, LoadedModule, config_number

_HEAD_DIM = ("head_dim", "attention_head_size", "key_value_proj_dim")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")


@dataclass(frozen=True)
class Attention:
    """One attention module; widths are elements per token of all heads together.

    Attributes:
        queries, keys, values, out: widths.
        window: past keys that a query sees, itself included; None for all.
        pairs: visible pairs of a query and a key in the microbatch.
        rows, key_rows: rows of queries, and of keys and values, in the microbatch.
    """

    queries: int
    keys: int
    values: int
    out: int
    window: int | None
    pairs: float
    rows: float
    key_rows: float

    @property
    def pair_flops(self) -> float:
        """FLOPs of the two products of a forward per visible pair."""
        return 2.0 * (self.queries + self.out)


class AttentionCounter:
    """Finds the attention in parts of a module."""

    def __init__(self, loaded: LoadedModule) -> None:
        self.loaded = loaded

    def below(self, place: str) -> Iterator[Attention]:
        """Yield the attention below a submodule, except modules whose number of heads is
        unknown."""
        load = self.loaded.load
        counted = {n: a for n, a in self.loaded.seen.items() if is_within(n, (place,)) or not place}
        for sizes in counted.values():
            rows, keys, pairs = (size * load.total for size in sizes[:3])
            yield Attention(*sizes[3:], None, pairs, rows, keys)
        if counted and not self.loaded.causal:
            return
        for name, attention in self._modules(place).items():
            if any(is_within(path, (name,)) or is_within(name, (path,)) for path in counted):
                continue
            if (widths := self._widths(attention)) is not None:
                window = _window(attention, self.loaded.config)
                pairs = load.samples * self._pairs(window)
                yield Attention(*widths, window, pairs, load.total, load.total)

    def _modules(self, place: str) -> dict[str, nn.Module]:
        """Return the attention modules below ``place``, found by their class names."""
        attentions = {
            ".".join(filter(None, (place, name))): module
            for name, module in self.loaded.module.get_submodule(place).named_modules()
            if "attention" in type(module).__name__.lower()
        }
        # The innermost modules with a number of heads (BertSelfAttention, not the BertAttention
        # around it). If none has one, the first module, with the config's heads.
        knowing = {n: m for n, m in attentions.items() if config_number(HEADS, m) is not None}
        inner = {
            n: m for n, m in knowing.items()
            if not self.loaded.pools(n) and not any(o.startswith(n + ".") for o in knowing)
        }
        return inner or dict(list(attentions.items())[:1])

    def _widths(self, attention: nn.Module) -> tuple[int, int, int, int] | None:
        heads = config_number(HEADS, attention, self.loaded.config)
        if heads is None:
            return None
        size = config_number(_HEAD_DIM, attention, self.loaded.config)
        if size is None and self.loaded.hidden is not None:
            size = self.loaded.hidden // heads
        shared = config_number(_KV_HEADS, attention, self.loaded.config) or heads
        query = config_number(("qk_head_dim",), attention) or size
        value = config_number(("v_head_dim",), attention) or size
        if query is None or value is None:
            return None
        return heads * query, shared * query, shared * value, heads * value

    def _pairs(self, window: int | None) -> float:
        """Return the visible pairs of a query and a key in one sample."""
        T = self.loaded.load.tokens
        if not self.loaded.causal:
            return float(T * T)
        W = min(window or T, T)
        return W * T - W * (W - 1) / 2


def _window(attention: nn.Module, config: Any) -> int | None:
    """Return the past keys that a query sees, itself included; None for all."""
    window = getattr(config, "sliding_window", None)
    kinds, index = getattr(config, "layer_types", None), getattr(attention, "layer_idx", None)
    if hasattr(attention, "sliding_window"):
        window = attention.sliding_window
    elif getattr(config, "use_sliding_window", True) is False:
        window = None
    elif kinds is not None and isinstance(index, int) and kinds[index] != "sliding_attention":
        window = None
    return window if isinstance(window, int) else None
