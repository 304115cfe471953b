"""Work items of the Triton attention kernels: the tiles of each program, and their order.

They are computed on the host from the runs of a mask (kernels/mask/tiles.py), as small tables:

- *items*: one per block of rows, or several if a block is split; heaviest first, so that light
  items fill the end of the grid;
- *runs*: runs of blocks of the other side; an item's full runs come before its partial ones;
- *merges*: the split blocks and the slots of their parts (Cornstarch v2 §3.2.2: long rows are split
  into sub-blocks whose outputs are aggregated by LSE).

Pure numpy. The same tables serve the forward kernel and the query's gradient (rows are queries,
runs are of key blocks) and, transposed, the gradient of keys and values.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raymm.kernels.flash.gpu.ops import (
    ITEM_BATCH,
    ITEM_COLUMNS,
    ITEM_FULL_RUN,
    ITEM_FULL_TILES,
    ITEM_MASK,
    ITEM_PARTIAL_RUN,
    ITEM_PARTIAL_TILES,
    ITEM_SLOT,
    MERGE_COLUMNS,
)
from raymm.kernels.mask.compiled import compiled
from raymm.kernels.mask.tiles import Tiles

ITEM_TILES = 2
"""Cost of starting and ending a program, in tiles."""
PART_TILES = 320
"""Cost of a part (write, read and merge its fp32 output), in tiles of one key: 8 bytes per output
element at 25 GB/s per SM, against 4 FLOP per element and key at 3.8 TFLOP/s per SM (H100 SXM: 3.35
TB/s, 500 TFLOP/s in attention, 132 SMs)."""
SMALLEST_PART = 4
"""Tiles; shorter parts would spend most of their time on starting and ending."""
REPLAYED = 64
"""Items per processor whose order the estimate simulates."""
GAIN = 0.02
"""A finer split must shorten the estimate by this fraction to be chosen."""


@dataclass(frozen=True)
class WorkTables:
    """Tables of a kernel, as numpy arrays.

    Attributes:
        items: (n, 8) int32, heaviest first: mask, sequence of the batch, block, first full run,
            full tiles, first partial run, partial tiles, slot of the workspace (-1 if the block is
            not split).
        runs: (R + 1, 2) int32: first block and index after the last. The last row is padding that
            kernels may read and do not use.
        merges: (m, 4) int32: sequence, block, first slot, number of slots.
        slots: parts in the workspace.
    """

    items: np.ndarray
    runs: np.ndarray
    merges: np.ndarray
    slots: int


def makespan(work: np.ndarray, heads: int, processors: int) -> float:
    """Return the time to process ``heads`` copies of every item, longest first, each on the
    processor that is free first. Items after the longest :data:`REPLAYED` per processor count as
    divisible.

    Args:
        work: (n,) per item, any unit.
    """
    work = np.sort(np.asarray(work, dtype=np.float64))[::-1]
    if not len(work):
        return 0.0
    replayed = min(len(work) * heads, REPLAYED * processors)
    return max(_replay(work, heads, processors, replayed), work.sum() * heads / processors)


@compiled
def _replay(work: np.ndarray, heads: int, processors: int, count: int) -> float:
    free = [0.0] * processors  # a heap
    last = 0.0
    for i in range(count):
        end = free[0] + work[i // heads]
        heapq.heapreplace(free, end)
        last = max(last, end)
    return last


def parts_of(work: np.ndarray, most: int) -> np.ndarray:
    """Return (n,) int64 the number of parts of at most ``most`` tiles per block, at least 1."""
    return np.maximum(-(-np.asarray(work, dtype=np.int64) // most), 1)


def choose_split(work: np.ndarray, heads: int, processors: int, part_cost: float) -> int | None:
    """Return the most tiles that a work item may have; None if splitting does not pay off.

    Compares the estimated time without splitting with that of parts of 1, 1/2, 1/4 and 1/8 of a
    processor's mean load, including the cost of each part. A finer split must gain 2%. If the
    longest block is at most 2% of the mean load, no split can. The result depends only on the
    arguments, so every rank and every run decides the same.

    Args:
        work: (n,) int64 tiles per block.
        heads: programs per block.
        processors: programs that run at a time.
        part_cost: cost of writing and merging one part, in tiles.
    """
    longest = int(work.max()) if len(work) else 0
    mean = (work + ITEM_TILES).sum() * heads / processors
    if longest + ITEM_TILES <= GAIN * mean:
        return None
    best, chosen = makespan(work + ITEM_TILES, heads, processors), None
    for divisor in (1, 2, 4, 8):
        most = max(int(mean / divisor), SMALLEST_PART)
        if most >= longest:
            continue
        part_counts = parts_of(work, most)
        cost = ITEM_TILES + np.where(part_counts > 1, part_cost, 0.0)
        estimate = makespan(np.repeat(work / part_counts + cost, part_counts), heads, processors)
        if estimate < best * (1 - GAIN):
            best, chosen = estimate, most
    return chosen


def head_span(heads: int, group: int, bytes_per_group: int, cache_bytes: int) -> int:
    """Return the number of heads whose programs are launched side by side, a divisor of ``heads``:
    as many whole groups as have their inputs (``bytes_per_group`` each) in a cache of
    ``cache_bytes``. ``group`` is the number of query heads per key head."""
    groups = heads // group
    fitting = max(1, min(groups, cache_bytes // max(bytes_per_group, 1)))
    while groups % fitting:
        fitting -= 1
    return fitting * group


def work_tables(
    tiles: Sequence[Tiles],
    sequences: Sequence[int],
    sizes: Sequence[int],
    block: int,
    most: int | None,
) -> WorkTables:
    """Return the tables of a batch.

    Args:
        tiles: per distinct mask.
        sequences: (B,) mask index of every sequence of the batch.
        sizes: per distinct mask, tokens of the side of the runs.
        block: tokens of a block on that side.
        most: most tiles of an item; None to split nothing.
    """
    mask_tables = [
        _mask_tables(table, size, block, most) for table, size in zip(tiles, sizes, strict=True)
    ]
    run_offsets = np.cumsum([0] + [len(table.runs) for table in mask_tables])
    items = [np.zeros((0, ITEM_COLUMNS), dtype=np.int64)]
    merges = [np.zeros((0, MERGE_COLUMNS), dtype=np.int64)]
    slots = 0
    for sequence, mask in enumerate(sequences):
        item, merge = mask_tables[mask].items.copy(), mask_tables[mask].merges.copy()
        item[:, ITEM_MASK], item[:, ITEM_BATCH] = mask, sequence
        item[:, [ITEM_FULL_RUN, ITEM_PARTIAL_RUN]] += run_offsets[mask]
        item[item[:, ITEM_SLOT] >= 0, ITEM_SLOT] += slots
        merge[:, 0] = sequence
        merge[:, 2] += slots
        items.append(item)
        merges.append(merge)
        slots += mask_tables[mask].slots
    joined = np.concatenate(items)
    work = joined[:, ITEM_FULL_TILES] + joined[:, ITEM_PARTIAL_TILES]
    padding = np.zeros((1, 2), dtype=np.int64)
    return WorkTables(
        joined[np.argsort(-work, kind="stable")].astype(np.int32),
        np.concatenate([*(table.runs for table in mask_tables), padding]).astype(np.int32),
        np.concatenate(merges).astype(np.int32),
        slots,
    )


def _mask_tables(tiles: Tiles, size: int, block: int, most: int | None) -> WorkTables:
    """Return the tables of one mask and sequence: items in block order, runs without padding."""
    owner, first, stop, full = _order(tiles, size, block)
    length = stop - first
    # Coordinates of tiles: the tiles of all blocks concatenated, full tiles of a block first.
    run_at = np.cumsum(length) - length
    n_blocks = len(tiles.offsets) - 1
    work = np.bincount(owner, weights=length, minlength=n_blocks).astype(np.int64)
    block_at = np.cumsum(work) - work
    part_counts = parts_of(work, most) if most else np.ones(n_blocks, dtype=np.int64)
    # Parts of a block differ by at most one tile.
    part_block = np.repeat(np.arange(n_blocks), part_counts)
    part_number = np.arange(len(part_block)) - np.repeat(
        np.cumsum(part_counts) - part_counts, part_counts
    )
    part_at = block_at[part_block] + work[part_block] * part_number // part_counts[part_block]
    # Split runs where parts begin.
    edges = np.unique(np.concatenate([run_at, part_at[work[part_block] > 0]]))
    run = np.searchsorted(run_at, edges, side="right") - 1
    cut_first = first[run] + edges - run_at[run]
    cut_length = np.append(edges[1:], length.sum()) - edges
    part_stop = np.append(part_at[1:], length.sum())
    cut_full = np.append(0, np.cumsum(full[run]))
    tiles_full = np.append(0, np.cumsum(cut_length * full[run]))
    begin = np.searchsorted(edges, part_at)
    end = np.searchsorted(edges, part_stop)
    n_full = tiles_full[end] - tiles_full[begin]
    is_split = part_counts[part_block] > 1
    slots = np.where(is_split, np.cumsum(is_split) - 1, -1)
    zeros = np.zeros(len(part_block), dtype=np.int64)
    first_partial = begin + cut_full[end] - cut_full[begin]
    n_partial = part_stop - part_at - n_full
    columns = (zeros, zeros, part_block, begin, n_full, first_partial, n_partial, slots)
    items = np.stack(columns, axis=1)
    split = np.flatnonzero(part_counts > 1)
    first_slot = np.cumsum(part_counts[split]) - part_counts[split]
    merges = np.stack([np.zeros_like(split), split, first_slot, part_counts[split]], axis=1)
    runs = np.stack([cut_first, cut_first + cut_length], axis=1)
    return WorkTables(items, runs, merges, int(is_split.sum()))


def _order(
    tiles: Tiles, size: int, block: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return owner, first block, stop and full of all runs, by owner, full runs first. An
    incomplete last block counts as partial, because full tiles are read without a bounds check."""
    runs = tiles.runs.astype(np.int64)
    owner = np.repeat(np.arange(len(tiles.offsets) - 1), np.diff(tiles.offsets))
    first, stop, full = runs[:, 0], runs[:, 1].copy(), runs[:, 2]
    n_blocks = -(-size // block)
    cut = (stop == n_blocks) & (full == 1) & (size % block != 0)
    stop[cut] -= 1
    tail = np.full(int(cut.sum()), n_blocks - 1)
    owner = np.concatenate([owner, owner[cut]])
    first, stop = np.concatenate([first, tail]), np.concatenate([stop, tail + 1])
    full = np.concatenate([full, np.zeros_like(tail)])
    valid = stop > first
    order = np.lexsort((first[valid], 1 - full[valid], owner[valid]))
    return owner[valid][order], first[valid][order], stop[valid][order], full[valid][order]
