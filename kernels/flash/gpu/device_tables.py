"""Device tables for a batch of masks: per-token arrays and the kernels' work tables.

All layers of a model, and both passes, share a plan. Plans of the last few batches are cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from raymm.kernels.flash.gpu.launch_configs import AttentionConfig
from raymm.kernels.flash.gpu.ops import TABLE_UNIT
from raymm.kernels.flash.gpu.work_items import (
    PART_TILES,
    WorkTables,
    choose_split,
    head_span,
    work_tables,
)
from raymm.kernels.host_copies import to_device
from raymm.kernels.mask.columns import ATTEND, IDENTITY, KEY_START, START
from raymm.kernels.mask.mask import AttentionMask
from raymm.kernels.mask.tiles import key_runs, query_runs

MOST_IDENTITIES = 32
CACHED_PLANS = 16
"""Batches whose plans are cached; each takes about 40 bytes per token of every distinct mask."""
CACHE_SHARE = 0.5
"""Share of the L2 cache that keys and values of neighbouring programs may fill."""
DEFAULT_CACHE_BYTES = 32 * 2**20


def filled_tokens(tokens: int) -> int:
    """Return the length of a table for ``tokens`` tokens, padded to whole :data:`TABLE_UNIT`."""
    return -(-tokens // TABLE_UNIT) * TABLE_UNIT


@dataclass(frozen=True)
class DeviceTables:
    """Work tables on the device, and the number of heads that are launched side by side."""

    items: torch.Tensor
    runs: torch.Tensor
    merges: torch.Tensor
    slots: int
    head_span: int


@dataclass(frozen=True)
class Layout:
    """Inputs of the work tables, except masks.

    Attributes:
        query_heads, key_heads: Hq, Hk.
        row_bytes: size of one head's key or query row.
        processors: multiprocessors to balance over; None to split nothing.
        cache_bytes: size of the L2 cache.
    """

    query_heads: int
    key_heads: int
    row_bytes: int
    processors: int | None
    cache_bytes: int = DEFAULT_CACHE_BYTES

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.query_heads // self.key_heads


class AttentionPlan:
    """Tables of one batch of masks, created on first use.

    Attributes:
        bounds: (U, 4, Tq) int32 of the U distinct masks: lo1, length1, lo2, length2 of every row.
            Like the next two, padded with zeros to whole TABLE_UNITs.
        attend, identity: (U, Tq) and (U, Tk) int32; the same tensor as ``bounds`` if no mask needs
            them.
        needs_bits: True if some mask needs attend and identity.
    """

    def __init__(
        self,
        masks: tuple[AttentionMask, ...],
        config: AttentionConfig,
        layout: Layout,
        device: torch.device,
    ) -> None:
        self.config, self.layout, self.device = config, layout, device
        self._masks = list(dict.fromkeys(masks))
        number = {mask: index for index, mask in enumerate(self._masks)}
        self._sequences = [number[mask] for mask in masks]
        self.needs_bits = any(mask.needs_bits for mask in self._masks)
        lo1, hi1, lo2, hi2 = np.stack([mask.bounds() for mask in self._masks], axis=1)
        lengths = [np.maximum(hi - lo, 0) for lo, hi in ((lo1, hi1), (lo2, hi2))]
        self.bounds = self._filled(np.stack([lo1, lengths[0], lo2, lengths[1]], axis=1))
        self.attend = self.identity = self.bounds
        if self.needs_bits:
            self.attend, self.identity = self._bits()

    def _bits(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return attend and identity with one of 32 bits per identity that occurs."""
        identities = [mask.key_table[:, IDENTITY] for mask in self._masks]
        distinct = np.unique(np.concatenate(identities))
        if len(distinct) > MOST_IDENTITIES:
            raise ValueError(
                f"the masks of a batch have {len(distinct)} different key identities; a GPU "
                f"supports at most {MOST_IDENTITIES}"
            )
        bit = np.left_shift(np.int64(1), np.arange(len(distinct)))
        attends, keys = [], []
        for mask, identity in zip(self._masks, identities, strict=True):
            rows = mask.query_table
            sees = (rows[:, ATTEND, None] & distinct) != 0
            seen = (sees * bit).sum(axis=1)
            attends.append(np.repeat(seen, mask.query_stops - rows[:, START]))
            lengths = mask.key_stops - mask.key_table[:, KEY_START]
            keys.append(np.repeat(bit[np.searchsorted(distinct, identity)], lengths))
        return self._filled(np.stack(attends)), self._filled(np.stack(keys))

    def _filled(self, array: np.ndarray) -> torch.Tensor:
        tokens = array.shape[-1]
        missing = [(0, 0)] * (array.ndim - 1) + [(0, filled_tokens(tokens) - tokens)]
        return self._on_device(np.pad(array, missing))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return to_device(
            torch.from_numpy(np.ascontiguousarray(array.astype(np.int32))), self.device
        )

    @cached_property
    def forward(self) -> DeviceTables:
        """Tables per block of query rows, for the forward kernel."""
        return self._query_side(self.config.forward, 1.0)

    @cached_property
    def backward_query(self) -> DeviceTables:
        """Tables per block of query rows, for the query's gradient (three products per tile)."""
        backward, forward = self.config.backward_query, self.config.forward
        if (backward.block_q, backward.block_k) == (forward.block_q, forward.block_k):
            return self.forward
        return self._query_side(backward, 2 / 3)

    def _query_side(self, kernel, cost: float) -> DeviceTables:
        layout = self.layout
        tiles = [key_runs(mask, kernel.block_q, kernel.block_k) for mask in self._masks]
        most = self._most(tiles, layout.query_heads, kernel, cost * PART_TILES / kernel.block_k)
        tables = work_tables(
            tiles,
            self._sequences,
            [mask.n_keys for mask in self._masks],
            kernel.block_k,
            most,
        )
        n_keys = self._masks[0].n_keys
        return self._tables(
            tables,
            head_span(
                layout.query_heads,
                layout.group,
                2 * n_keys * layout.row_bytes,
                int(layout.cache_bytes * CACHE_SHARE),
            ),
        )

    @cached_property
    def backward_key(self) -> DeviceTables:
        """Tables per block of keys, for the gradients of keys and values (four products per tile,
        two outputs, every tile once per query head of the group)."""
        kernel, layout = self.config.backward_key, self.layout
        tiles = [query_runs(mask, kernel.block_q, kernel.block_k) for mask in self._masks]
        cost = PART_TILES / kernel.block_q / layout.group
        most = self._most(tiles, layout.key_heads, kernel, cost)
        tables = work_tables(
            tiles,
            self._sequences,
            [mask.n_queries for mask in self._masks],
            kernel.block_q,
            most,
        )
        n_queries = self._masks[0].n_queries
        return self._tables(
            tables,
            head_span(
                layout.key_heads,
                1,
                2 * n_queries * layout.row_bytes * layout.group,
                int(layout.cache_bytes * CACHE_SHARE),
            ),
        )

    def _most(self, tiles, heads: int, kernel, cost: float) -> int | None:
        if self.layout.processors is None:
            return None
        work = np.concatenate([tiles[mask].work for mask in self._sequences])
        return choose_split(work, heads, self.layout.processors, cost)

    def _tables(self, tables: WorkTables, span: int) -> DeviceTables:
        return DeviceTables(
            self._on_device(tables.items),
            self._on_device(tables.runs),
            self._on_device(tables.merges),
            tables.slots,
            span,
        )


@lru_cache(maxsize=CACHED_PLANS)
def attention_plan(
    masks: tuple[AttentionMask, ...],
    config: AttentionConfig,
    layout: Layout,
    device: torch.device,
) -> AttentionPlan:
    """Return the plan of a batch, cached by its mask objects."""
    return AttentionPlan(masks, config, layout, device)
