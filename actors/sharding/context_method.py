"""Which context-parallel method an attention call uses: the one that sends the fewest bytes.

In self-attention only methods that compute over all keys at once are asked: ``ring`` and
``rotate`` send about as much as ``gather``, in hops that wait for one another, and a balanced
distribution of tokens does not make every hop balanced.

All processes of a group must use the same method, so nothing that differs between them is
asked: shapes of the whole group, masks of the whole sequence, dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from raymm.kernels.context_parallel.attention import context_attention
from raymm.kernels.context_parallel.call import ACCUMULATOR, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.mask.mask import AttentionMask
from raymm.scheduler.context_parallel.traffic import METHODS, AttentionShape, choose_method

Attend = Callable[..., torch.Tensor]
"""``attend(query, key, value, masks, scale=, softcap=) -> output``: what
:data:`raymm.kernels.hf.self_attention.ATTEND_ARGUMENT` takes."""
# Layers of two kinds, microbatches of a few shapes under way.
_CACHED_CHOICES = 256
NEEDED = "needed"
_AT_ONCE = ("gather", NEEDED, "ulysses")
# ``needed`` plans which keys go where for every mask; it must save this much of the bytes.
_CLEARLY = 0.75


def attend_over(group: ContextGroup, *, backward: bool = True) -> Attend:
    """Attention over the processes of a group, each call by the method of :func:`choose`.

    Args:
        backward: whether what is sent in a backward pass counts. It must not depend on whether
            gradients are recorded at the moment: a stage that recomputes would use one method
            first and another one later.
    """

    def attend(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
        masks: Sequence[AttentionMask], **options: Any,
    ) -> torch.Tensor:  # fmt: skip
        method = choose(
            tuple(masks), group.queries, group.keys,
            heads=(query.shape[1], key.shape[1]), head_dim=query.shape[3],
            element_bytes=computed_in(query).itemsize, sequences=query.shape[0],
            backward=backward,
        )  # fmt: skip
        return context_attention(query, key, value, masks, group, method=method, **options)

    return attend


@lru_cache(maxsize=_CACHED_CHOICES)
def choose(
    masks: tuple[AttentionMask, ...],
    queries: ContextLayout,
    keys: ContextLayout,
    *,
    heads: tuple[int, int],
    head_dim: int,
    element_bytes: int,
    sequences: int,
    backward: bool = True,
    methods: tuple[str, ...] | None = None,
) -> str:
    """The method whose busiest process sends the fewest bytes (``needed`` if clearly so), kept
    per layout: all layers of a microbatch ask the same.

    Args:
        masks: of the whole sequence, one or one each; what their rows see counts for ``needed``.
        queries, keys: which tokens each process has.
        heads: of queries, and of keys and values, of all that a process has.
        head_dim: of one head.
        element_bytes: of one element of Q, K, V.
        sequences: B.
        backward: whether there is a backward pass.
        methods: which may be chosen. Default: in self-attention those that compute over all keys
            at once, else all.

    Returns:
        One of :data:`raymm.kernels.context_parallel.attention.METHODS`.
    """
    shape = AttentionShape(
        queries.sizes, keys.sizes, *heads, head_dim, activation_bytes=element_bytes,
        accumulator_bytes=ACCUMULATOR.itemsize, sequences=sequences,
    )  # fmt: skip
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
    """[r][s]: how many keys of process ``s`` some row of process ``r`` sees, in some mask."""
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


def computed_in(tensor: torch.Tensor) -> torch.dtype:
    """The dtype that attention computes in: autocast's, if that is on."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return tensor.dtype
