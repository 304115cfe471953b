"""Helpers that the attention kernels share: loading rows, mask test, dot products, run cursors.

Legend (all kernels): ``M`` rows of a block of queries, ``N`` keys of a block, ``D`` head dim,
``BLOCK_D`` the next power of two. Strides are in units of :data:`STRIDE_UNIT` elements, so that the
compiler knows that rows are aligned, and one compiled kernel serves every length and layout.
"""

from __future__ import annotations

import triton
import triton.language as tl

STRIDE_UNIT = 8
"""Elements; 16 bytes of bf16 or fp16."""

TABLE_UNIT = 256
"""Tokens; tables with a value per row or key are padded to whole units (the largest block), so that
kernels read them without bounds checks."""

# Columns of a work item.
ITEM_MASK, ITEM_BATCH, ITEM_BLOCK = 0, 1, 2
ITEM_FULL_RUN, ITEM_FULL_TILES, ITEM_PARTIAL_RUN, ITEM_PARTIAL_TILES = 3, 4, 5, 6
ITEM_SLOT = 7  # of the workspace; -1 if the item covers its block alone
ITEM_COLUMNS = 8
# Columns of a merge: batch, block, first slot, number of slots.
MERGE_COLUMNS = 4

# The same constants for kernels, which can read only constexpr globals.
UNIT = tl.constexpr(STRIDE_UNIT)
_TABLE_UNIT = tl.constexpr(TABLE_UNIT)
_MASK, _BATCH, _BLOCK = (tl.constexpr(c) for c in (ITEM_MASK, ITEM_BATCH, ITEM_BLOCK))
_FULL_RUN, _FULL_TILES = tl.constexpr(ITEM_FULL_RUN), tl.constexpr(ITEM_FULL_TILES)
_PARTIAL_RUN, _PARTIAL_TILES = tl.constexpr(ITEM_PARTIAL_RUN), tl.constexpr(ITEM_PARTIAL_TILES)
_SLOT, _ITEM_COLUMNS = tl.constexpr(ITEM_SLOT), tl.constexpr(ITEM_COLUMNS)
_MERGE_COLUMNS = tl.constexpr(MERGE_COLUMNS)


@triton.jit
def work_item(items, n_items, head_span):
    """Return the work item and head of this program. Spans of ``head_span`` heads run one after
    another, so that the keys of a span stay in the L2 cache. Within a span, items are in table
    order (heaviest first), with all heads side by side."""
    program = tl.program_id(0)
    per_span = n_items * head_span
    index = program % per_span
    head = (program // per_span) * head_span + index % head_span
    return items + (index // head_span) * _ITEM_COLUMNS, head


@triton.jit
def item_block(item):
    """Return mask (64 bits), sequence of the batch and block of an item."""
    return tl.load(item + _MASK).to(tl.int64), tl.load(item + _BATCH), tl.load(item + _BLOCK)


@triton.jit
def item_tiles(item, FULL: tl.constexpr):
    """Return the first run and the number of the full, or the partial, tiles of an item."""
    if FULL:
        return tl.load(item + _FULL_RUN), tl.load(item + _FULL_TILES)
    return tl.load(item + _PARTIAL_RUN), tl.load(item + _PARTIAL_TILES)


@triton.jit
def item_slot(item):
    """Return the slot of the workspace; negative if the item covers its block alone."""
    return tl.load(item + _SLOT)


@triton.jit
def merge_block(merges, n_heads, CHUNKS: tl.constexpr):
    """Return a merge program's sequence, head, block, chunk of rows, first slot and number of
    slots."""
    program = tl.program_id(0)
    merge = merges + (program // (n_heads * CHUNKS)) * _MERGE_COLUMNS
    head = (program // CHUNKS) % n_heads
    chunk = program % CHUNKS
    return (
        tl.load(merge), head, tl.load(merge + 1), chunk, tl.load(merge + 2), tl.load(merge + 3)
    )  # fmt: skip


@triton.jit
def head_base(base, batch, head, stride_b, stride_h):
    """Return the address of the first row of one head, in 64 bits."""
    return base + (batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h) * UNIT


@triton.jit
def row_base(base, start, stride_t):
    """Return the address of row ``start``, in 64 bits: long inputs exceed 2^31 elements."""
    return base + start.to(tl.int64) * stride_t * UNIT


@triton.jit
def load_rows(
    base, stride_t, n_rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Load (ROWS, BLOCK_D) starting at ``base``, with zeros past ``D`` and, with CHECK, from row
    ``n_rows`` on."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * (stride_t * UNIT) + columns[None, :]
    if CHECK:
        if D == BLOCK_D:
            return tl.load(pointers, mask=rows[:, None] < n_rows, other=0.0)
        return tl.load(pointers, mask=(rows[:, None] < n_rows) & (columns[None, :] < D), other=0.0)
    if D == BLOCK_D:
        return tl.load(pointers)
    return tl.load(pointers, mask=columns[None, :] < D, other=0.0)


@triton.jit
def load_tile(
    source, batch, head, start, stride_t, n_rows, ROWS: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, CHECK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Load (ROWS, BLOCK_D) from row ``start`` on: from a tensor's descriptor (TMA), which returns
    zeros out of bounds, or from a head's address, like :func:`load_rows`."""
    if TMA:
        tile = tl.reshape(source.load([batch, head, start, 0]), (ROWS, BLOCK_D))
    else:
        base = row_base(source, start, stride_t)
        tile = load_rows(base, stride_t, n_rows - start, ROWS, D, BLOCK_D, CHECK)
    return tile


@triton.jit
def store_rows(
    base, tile, stride_t, n_rows, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Store a tile; the inverse of a checked :func:`load_rows`."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    pointers = base + rows[:, None] * (stride_t * UNIT) + columns[None, :]
    mask = (rows[:, None] < n_rows) & (columns[None, :] < D)
    tl.store(pointers, tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def slot_base(workspace, slot, head, n_heads, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the address of the (ROWS, BLOCK_D) part of a slot and head; dense, fp32."""
    return workspace + (slot.to(tl.int64) * n_heads + head) * (ROWS * BLOCK_D)


@triton.jit
def slot_offsets(ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return (ROWS, BLOCK_D) offsets within a slot of the dense workspace."""
    return tl.arange(0, ROWS)[:, None] * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def dot(a, b, accumulator, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Compute a @ b + accumulator in fp32. UPCAST casts to fp32 first, because the interpreter
    multiplies bf16 as the integers that store it."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def capped(scores, inner, SOFTCAP: tl.constexpr):
    """Return tanh(scores * scale / softcap), given ``inner`` = 2 log2(e) scale / softcap; without
    softcap, the scores."""
    if SOFTCAP:
        # 1 - 2 / (exp(2 x) + 1); the square of rsqrt takes fewer registers than a division.
        root = tl.rsqrt(tl.exp2(scores * inner) + 1.0)
        scores = 1.0 - 2.0 * root * root
    return scores


@triton.jit
def filled(n_tokens):
    """Return the length of a table with a value for each of ``n_tokens``, padded to whole units."""
    return tl.cdiv(n_tokens, _TABLE_UNIT) * _TABLE_UNIT


@triton.jit
def load_bounds(bounds, rows, start, n_filled):
    """Load lo1, length1, lo2, length2 of rows; padding rows see no key."""
    pointers = bounds + start + rows
    lo1 = tl.load(pointers)
    length1 = tl.load(pointers + n_filled)
    lo2 = tl.load(pointers + 2 * n_filled)
    length2 = tl.load(pointers + 3 * n_filled)
    return lo1, length1, lo2, length2


@triton.jit
def visible(keys, lo1, length1, lo2, length2, attend, identity, BITS: tl.constexpr):
    """Apply the mask test (kernels/mask/mask.py); arguments broadcast over rows and keys. One
    unsigned comparison checks both ends of an interval."""
    first = (keys - lo1).to(tl.uint32, bitcast=True) < length1.to(tl.uint32, bitcast=True)
    second = (keys - lo2).to(tl.uint32, bitcast=True) < length2.to(tl.uint32, bitcast=True)
    seen = first | second
    if BITS:
        seen = seen & ((attend & identity) != 0)
    return seen


@triton.jit
def next_block(runs, run, block, stop):
    """Return the run, block and stop that follow ``block`` in the runs of a work item. After the
    last run this reads the next table entry, which exists."""
    ended = block + 1 == stop
    run += ended.to(tl.int32)
    first = tl.load(runs + 2 * run)
    stop = tl.load(runs + 2 * run + 1)
    return run, tl.where(ended, first, block + 1), stop
