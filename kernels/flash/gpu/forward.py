"""Forward attention kernel: online softmax over runs of key blocks (FlashAttention-2).

There is one program per work item and head. Parts of split blocks are merged by LSE (Cornstarch v2
§3.2.2). For the legend and helpers see ``ops.py``.
"""

# Kernels are called with plain numbers and bools for tl.constexpr, which Triton's types reject.
# ``tl.range`` is not typed as an iterator.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from raymm.kernels.flash.gpu.ops import (
    capped,
    dot,
    filled,
    head_base,
    item_block,
    item_slot,
    item_tiles,
    load_bounds,
    load_tile,
    merge_block,
    next_block,
    row_base,
    slot_base,
    slot_offsets,
    store_rows,
    visible,
    work_item,
)

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _key_tiles(
    acc, total, largest, query,
    key, value, batch, key_head, k_t, v_t, n_keys,
    lo1, length1, lo2, length2, attend, identity,
    runs, run, n_tiles, inner, multiplier,
    FULL: tl.constexpr, BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Add ``n_tiles`` tiles of keys, starting at ``run``, to the running softmax: ``acc`` (M, D),
    ``total`` (M,) sums of weights, ``largest`` (M,) largest score in base 2."""
    columns = tl.arange(0, N)
    block, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    for _ in tl.range(n_tiles, disable_licm=TMA):
        start = block * N
        k = load_tile(key, batch, key_head, start, k_t, n_keys, N, D, BLOCK_D, not FULL, TMA)
        zeros = tl.zeros((query.shape[0], N), tl.float32)
        scores = capped(dot(query, tl.trans(k), zeros, PRECISION, UPCAST), inner, SOFTCAP)
        if FULL:
            new = tl.maximum(largest, tl.max(scores, 1) * multiplier)
            base = new
        else:
            keys = start + columns
            kinds = keys
            if BITS:
                kinds = tl.load(identity + keys)
            seen = visible(keys[None, :], lo1, length1, lo2, length2, attend, kinds[None, :], BITS)
            scores = tl.where(seen, scores, float("-inf"))
            new = tl.maximum(largest, tl.max(scores, 1) * multiplier)
            base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores * multiplier - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(weights, 1)
        v = load_tile(value, batch, key_head, start, v_t, n_keys, N, D, BLOCK_D, not FULL, TMA)
        acc = dot(weights.to(v.dtype), v, acc * shrink[:, None], PRECISION, UPCAST)
        largest = new
        run, block, stop = next_block(runs, run, block, stop)
    return acc, total, largest


@triton.jit(do_not_specialize=[
    "n_items", "head_span", "group", "n_heads", "n_queries", "n_keys",
    "q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "v_b", "v_h", "v_t", "o_b", "o_h", "o_t",
])  # fmt: skip
def attention_forward(
    query, key, value, out, lse, part_out, part_lse,
    bounds, attend, identity, items, runs,
    inner, multiplier,
    n_items, head_span, group, n_heads, n_queries, n_keys,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, o_b, o_h, o_t,
    BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Compute output and natural-log LSE of a block of rows over the tiles of one work item."""
    item, head = work_item(items, n_items, head_span)
    mask, batch, block = item_block(item)
    full_run, full_tiles = item_tiles(item, True)
    partial_run, partial_tiles = item_tiles(item, False)
    start = block * M
    rows = tl.arange(0, M)
    key_head = head // group
    if not TMA:
        query = head_base(query, batch, head, q_b, q_h)
        key = head_base(key, batch, key_head, k_b, k_h)
        value = head_base(value, batch, key_head, v_b, v_h)
    q = load_tile(query, batch, head, start, q_t, n_queries, M, D, BLOCK_D, True, TMA)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    total = tl.zeros((M,), tl.float32)
    largest = tl.full((M,), float("-inf"), tl.float32)
    acc, total, largest = _key_tiles(
        acc, total, largest, q, key, value, batch, key_head, k_t, v_t, n_keys,
        rows, rows, rows, rows, rows, identity,
        runs, full_run, full_tiles, inner, multiplier,
        True, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST, TMA,
    )  # fmt: skip
    n_rows = filled(n_queries)
    lo1, length1, lo2, length2 = load_bounds(bounds + mask * 4 * n_rows, rows, start, n_rows)
    kinds = rows
    if BITS:
        kinds = tl.load(attend + mask * n_rows + start + rows)
    acc, total, largest = _key_tiles(
        acc, total, largest, q, key, value, batch, key_head, k_t, v_t, n_keys,
        lo1[:, None], length1[:, None], lo2[:, None], length2[:, None], kinds[:, None],
        identity + mask * filled(n_keys),
        runs, partial_run, partial_tiles, inner, multiplier,
        False, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST, TMA,
    )  # fmt: skip
    has_keys = total > 0
    acc = acc * (1.0 / tl.where(has_keys, total, 1.0))[:, None]
    row_lse = tl.where(
        has_keys, (largest + tl.log2(tl.where(has_keys, total, 1.0))) * LN_2, float("-inf")
    )
    slot = item_slot(item)
    if slot < 0:
        o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
        store_rows(o_base, acc, o_t, n_queries - start, M, D, BLOCK_D)
        position = (batch.to(tl.int64) * n_heads + head) * n_queries + start
        tl.store(lse + position + rows, row_lse, mask=start + rows < n_queries)
    else:
        tl.store(slot_base(part_out, slot, head, n_heads, M, BLOCK_D)
                 + slot_offsets(M, BLOCK_D), acc)  # fmt: skip
        tl.store(part_lse + (slot.to(tl.int64) * n_heads + head) * M + rows, row_lse)


@triton.jit(do_not_specialize=["n_heads", "n_queries", "o_b", "o_h", "o_t"])
def merge_forward(
    part_out, part_lse, out, lse, merges,
    n_heads, n_queries, o_b, o_h, o_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge the parts of a block, ROWS rows per program: the sum of outputs weighted by exp(LSE of
    the part - LSE of the row), in slot order (deterministic)."""
    batch, head, block, chunk, first, n_slots = merge_block(merges, n_heads, M // ROWS)
    chunk *= ROWS
    rows = tl.arange(0, ROWS)
    start = block * M + chunk
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    for i in range(n_slots):
        slot_row = ((first + i).to(tl.int64) * n_heads + head) * M + chunk
        largest = tl.maximum(largest, tl.load(part_lse + slot_row + rows))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i in range(n_slots):
        slot_row = ((first + i).to(tl.int64) * n_heads + head) * M + chunk
        weight = tl.exp(tl.load(part_lse + slot_row + rows) - base)
        slot_out = tl.load(part_out + slot_row * BLOCK_D + slot_offsets(ROWS, BLOCK_D))
        acc += slot_out * weight[:, None]
        total += weight
    has_keys = total > 0
    acc = acc / tl.where(has_keys, total, 1.0)[:, None]
    o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
    store_rows(o_base, acc, o_t, n_queries - start, ROWS, D, BLOCK_D)
    position = (batch.to(tl.int64) * n_heads + head) * n_queries + start
    merged = tl.where(has_keys, largest + tl.log(tl.where(has_keys, total, 1.0)), float("-inf"))
    tl.store(lse + position + rows, merged, mask=start + rows < n_queries)
