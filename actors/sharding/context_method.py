"""Choice of the context-parallel method of an attention call: the one that sends the fewest bytes.

Self-attention only considers methods that compute over all keys at once, because ``ring`` and
``rotate`` send about as much in serial hops. The choice depends only on values that are equal on
all processes: shapes of the entire group, masks of the entire sequence, and dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raymm.kernels.context_parallel.attention import context_attention
from raymm.kernels.context_parallel.call import ACCUMULATOR, ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import METHODS, AttentionShape, choose_method

Attend = Callable[..., torch.Tensor]
"""``attend(query, key, value, masks, scale=, softcap=) -> output``, the type of
:data:`raymm.kernels.hf.self_attention.ATTEND_ARGUMENT`."""
# Enough for two kinds of layers and microbatches of a few shapes in flight.
_CACHED_CHOICES = 256
NEEDED = "needed"
_AT_ONCE = ("gather", NEEDED, "ulysses")
# ``needed`` plans key transfers for every mask, so its bytes must be below this share of the best.
_CLEARLY = 0.75


def attend_over(group: ContextGroup, *, backward: bool = True) -> Attend:
    """Return attention over the processes of a group, with the method of :func:`choose` for each
    call.

    ``backward`` counts bytes sent in a backward pass. It must not depend on whether gradients are
    currently recorded: a recomputing stage would change the method between its forwards.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: Sequence[AttentionMask], **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        shape = attention_shape(group, query, key)
        method = choose(tuple(masks), group.queries, group.keys, shape, backward=backward)
        call = ContextCall(group, masks, **options)
        return context_attention(query, key, value, call, method=method)

    return attend


@lru_cache(maxsize=_CACHED_CHOICES)
def choose(
    masks: tuple[AttentionMask, ...],
    queries: ContextLayout,
    keys: ContextLayout,
    shape: AttentionShape,
    *,
    backward: bool = True,
    methods: tuple[str, ...] | None = None,
) -> str:
    """Return the method whose busiest process sends the fewest bytes (``needed`` if clearly fewer).

    Choices are cached per layout, because all layers of a microbatch make the same call.

    Args:
        masks: masks of the entire sequence, one or one per sequence.
        queries, keys: the tokens of each process.
        shape: by :func:`attention_shape`.
        methods: candidates from :data:`raymm.kernels.context_parallel.methods.METHODS`. Default:
            in self-attention those that compute over all keys at once, else all.
    """
    if methods is None:
        methods = _AT_ONCE if queries == keys else METHODS
    dense = tuple(method for method in methods if method != NEEDED)
    best = choose_method(shape, backward=backward, methods=dense).chosen
    if NEEDED not in methods:
        return best.method
    needed = _needed_keys(masks, queries, keys)
    sparse = choose_method(shape, needed, backward=backward, methods=[NEEDED]).chosen
    return NEEDED if sparse.largest < _CLEARLY * best.largest else best.method


def _needed_keys(
    masks: tuple[AttentionMask, ...], queries: ContextLayout, keys: ContextLayout
) -> list[list[int]]:
    """Return at [r][s] how many keys of process ``s`` some row of process ``r`` sees, in some mask.
    """
    owner = np.empty(keys.length, dtype=np.int64)
    for rank, ranges in enumerate(keys.ranges):
        for start, stop in ranges:
            owner[start:stop] = rank
    counts = []
    for ranges in queries.ranges:
        seen = np.zeros(keys.length, dtype=bool)
        for mask in set(masks):
            seen |= mask.select_queries(ranges).seen_keys()
        counts.append(np.bincount(owner[seen], minlength=keys.num_ranks).tolist())
    return counts


def attention_shape(
    group: ContextGroup, query: torch.Tensor, key: torch.Tensor
) -> AttentionShape:
    """Return the shape of a call with query (B, Hq, Tq, D) and key (B, Hk, Tk, D)."""
    device, dtype = query.device.type, query.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    batch, heads, _, head_dim = query.shape
    return AttentionShape(
        group.queries.sizes, group.keys.sizes, heads, key.shape[1], head_dim,
        activation_bytes=dtype.itemsize, accumulator_bytes=ACCUMULATOR.itemsize, sequences=batch,
    )  # fmt: skip
