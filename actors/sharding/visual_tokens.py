"""Cross attention with context parallelism or masks (LV-XAttn §3.2).

Each process has a part of the visual tokens. Every layer sends queries, or keys and values,
whichever is fewer bytes.

Legend: ``B`` samples, ``T`` text tokens with padding, ``I`` items of a row, ``V`` visual tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from raymm.actors.modules.merge import seen_items
from raymm.actors.sharding.context_method import attention_shape, choose
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.hf.cross_attention import CROSS_ARGUMENT, Alone, CrossAttention
from raymm.kernels.host_copies import on_host, to_device
from raymm.kernels.mask.convert import cross_masks
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import METHODS

SHOWN, LENGTH = "cross_shown", "visual_length"
"""Side tensors: the items that text tokens of all processes see, and V."""


def own_visual_tokens(
    ports: Mapping[str, torch.Tensor], exchange: Exchange | None
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return a process's part of the visual tokens (B, V, H), and V; all without ``exchange``."""
    (length,) = {tensor.shape[1] for tensor in ports.values()}
    total = torch.tensor(length, device="cpu")
    if exchange is None:
        return dict(ports), total
    positions = ContextLayout.even(length, exchange.size).positions(exchange.rank)

    def part(tensor: torch.Tensor) -> torch.Tensor:
        if len(positions):
            return tensor.index_select(1, to_device(positions, tensor.device))
        # Models need at least one token; the product keeps this process in the backward.
        return tensor[:, :1] * 0

    return {name: part(tensor) for name, tensor in ports.items()}, total


def cross_arguments(
    side: Mapping[str, torch.Tensor], text: ContextGroup | None, config: Any, device: torch.device
) -> dict[str, Any]:
    """Return the keyword arguments for cross-attention layers.

    ``side`` has :data:`SHOWN` (B, up to T, I) and :data:`LENGTH`. ``text`` is None for a single
    process.
    """
    shown, length = on_host(side[SHOWN]), int(on_host(side[LENGTH]))
    if text is None:
        layout = ContextLayout.even(shown.shape[1], 1)
        text = ContextGroup(cast(Exchange, Alone()), layout, layout)
    exchange, queries = text.exchange, text.queries
    shown = F.pad(shown, (0, 0, 0, queries.length - shown.shape[1]))
    masks = cross_masks(seen_items(shown), length // shown.shape[2])
    group = ContextGroup(exchange, queries, ContextLayout.even(length, exchange.size))
    rows = (shown == 2).any(-1)[:, queries.positions(exchange.rank)]
    recompute = recomputes(config, queries.length, length)
    return {
        CROSS_ARGUMENT: CrossAttention(group, masks, LeastBytes(), recompute),
        "full_text_row_masked_out_mask": to_device(rows[:, None, :, None].float(), device),
    }


def recomputes(config: Any, text_tokens: int, visual_tokens: int) -> bool:
    """Return True if cross-attention layers should recompute keys and values (LV-XAttn §3.3).

    This pays off if they would dominate the saved activations. Token counts are per row, and the
    result is the same on all processes.
    """
    config = config.get_text_config()
    hidden, heads = config.hidden_size, config.num_attention_heads
    keys = (getattr(config, "num_key_value_heads", None) or heads) * (hidden // heads)
    inner = getattr(config, "intermediate_size", 4 * hidden)
    # Per text token: two norms' inputs and outputs, queries, attention's output; the MLP's inner.
    return visual_tokens * 2 * keys > text_tokens * (6 * hidden + 3 * inner)


@dataclass(frozen=True)
class LeastBytes:
    """Method choice, equal on all processes: send queries, or keys and values, whichever is fewer
    bytes.

    ``backward`` counts the bytes of a backward pass; ``methods`` are the candidates.
    """

    backward: bool = True
    methods: tuple[str, ...] = METHODS

    def __call__(
        self,
        group: ContextGroup,
        masks: tuple[AttentionMask, ...],
        query: torch.Tensor,
        key: torch.Tensor,
        recompute: bool = False,
    ) -> str:
        """Return the method for query (B, Hq, Tq, D) and key (B, Hk, Tk, D), given their shape and
        dtype.

        ``recompute``, for queries, keys and values in the backward pass, excludes ulysses.

        Raises:
            PlanError: none of the methods can be used.
        """
        methods = tuple(m for m in self.methods if not (recompute and m == "ulysses"))
        return choose(
            tuple(masks), group.queries, group.keys, attention_shape(group, query, key),
            backward=self.backward, methods=methods,
        )  # fmt: skip
