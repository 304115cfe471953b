"""Backward attention kernels (FlashAttention-2), without atomics: one pass over runs of key
blocks for the query's gradient, one over runs of query blocks, and over the query heads of a
group, for the gradients of keys and values. Every sum has one order, so two runs are equal to
the bit. Legend and helpers: triton_ops.
"""

# A tl.constexpr is a plain number or bool where a kernel is called, which Triton's types deny.
# pyright: reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from raymm.kernels.flash.gpu.ops import (
    UNIT,
    capped,
    dot,
    head_base,
    item_block,
    item_slot,
    item_tiles,
    load_bounds,
    load_rows,
    merge_block,
    next_block,
    row_base,
    slot_base,
    slot_offsets,
    store_rows,
    visible,
    work_item,
)


@triton.jit(do_not_specialize=[
    "n_heads", "n_queries", "o_b", "o_h", "o_t", "g_b", "g_h", "g_t",
])  # fmt: skip
def row_statistics(
    out, grad_out, lse, stats, factor,
    n_heads, n_queries, o_b, o_h, o_t, g_b, g_h, g_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What the other kernels subtract per row, stats (B, Hq, 2, Tq): from scores ``factor`` x
    LSE (+inf, which makes every weight 0, for rows that see nothing); from gradients of weights
    rowsum(grad_out * out)."""
    blocks = tl.cdiv(n_queries, ROWS)
    start = (tl.program_id(0) % blocks) * ROWS
    head = (tl.program_id(0) // blocks) % n_heads
    batch = tl.program_id(0) // (blocks * n_heads)
    rows = tl.arange(0, ROWS)
    inside = start + rows < n_queries
    o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
    g_base = row_base(head_base(grad_out, batch, head, g_b, g_h), start, g_t)
    o = load_rows(o_base, o_t, n_queries - start, ROWS, D, BLOCK_D, True)
    g = load_rows(g_base, g_t, n_queries - start, ROWS, D, BLOCK_D, True)
    position = (batch.to(tl.int64) * n_heads + head) * n_queries
    row_lse = tl.load(lse + position + start + rows, mask=inside, other=0.0)
    offset = tl.where(row_lse == float("-inf"), float("inf"), row_lse * factor)
    pointers = stats + 2 * position + start + rows
    tl.store(pointers, offset, mask=inside)
    tl.store(pointers + n_queries, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1), mask=inside)


@triton.jit
def _load_offset(stats, rows, start, n_queries):
    """Rows that are not get an offset of +inf: weights of 0."""
    return tl.load(stats + start + rows, mask=start + rows < n_queries, other=float("inf"))


@triton.jit
def _load_delta(stats, rows, start, n_queries):
    return tl.load(stats + n_queries + start + rows, mask=start + rows < n_queries, other=0.0)


@triton.jit
def _slope(scores, weights, SOFTCAP: tl.constexpr):
    """Weights times the softcap's slope (``scores`` are the tanh). Before the next product
    starts, so that the scores need no registers during it."""
    if SOFTCAP:
        weights = weights * (1.0 - scores * scores)
    return weights


@triton.jit
def _key_tiles(
    acc, query, grad_out, offset, delta,
    key, value, k_t, v_t, n_keys,
    lo1, length1, lo2, length2, attend, identity,
    runs, run, n_tiles, inner, multiplier,
    FULL: tl.constexpr, BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Add to ``acc`` (M, D) what ``n_tiles`` tiles of keys, from ``run`` on, give."""
    columns = tl.arange(0, N)
    block, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    for _ in range(n_tiles):
        start = block * N
        k = load_rows(row_base(key, start, k_t), k_t, n_keys - start, N, D, BLOCK_D, not FULL)
        v = load_rows(row_base(value, start, v_t), v_t, n_keys - start, N, D, BLOCK_D, not FULL)
        zeros = tl.zeros((query.shape[0], N), tl.float32)
        scores = capped(dot(query, tl.trans(k), zeros, PRECISION, UPCAST), inner, SOFTCAP)
        exponents = scores * multiplier - offset[:, None]
        if not FULL:
            keys = start + columns
            kinds = keys
            if BITS:
                kinds = tl.load(identity + keys, mask=keys < n_keys, other=0)
            seen = visible(keys[None, :], lo1, length1, lo2, length2, attend, kinds[None, :], BITS)
            exponents = tl.where(seen, exponents, float("-inf"))
        weights = _slope(scores, tl.exp2(exponents), SOFTCAP)
        grad_weights = dot(grad_out, tl.trans(v), zeros, PRECISION, UPCAST)
        grad_scores = weights * (grad_weights - delta[:, None])
        acc = dot(grad_scores.to(k.dtype), k, acc, PRECISION, UPCAST)
        run, block, stop = next_block(runs, run, block, stop)
    return acc


@triton.jit(do_not_specialize=[
    "n_items", "head_span", "group", "n_heads", "n_queries", "n_keys",
    "q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "v_b", "v_h", "v_t",
    "g_b", "g_h", "g_t", "dq_b", "dq_h", "dq_t",
])  # fmt: skip
def attention_backward_query(
    query, key, value, grad_out, stats, grad_query, part_grad,
    bounds, attend, identity, items, runs,
    inner, multiplier, scale,
    n_items, head_span, group, n_heads, n_queries, n_keys,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, dq_b, dq_h, dq_t,
    BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Gradient of a block of query rows over the tiles of one work item."""
    item, head = work_item(items, n_items, head_span)
    mask, batch, block = item_block(item)
    full_run, full_tiles = item_tiles(item, True)
    partial_run, partial_tiles = item_tiles(item, False)
    start = block * M
    rows = tl.arange(0, M)
    q_base = row_base(head_base(query, batch, head, q_b, q_h), start, q_t)
    g_base = row_base(head_base(grad_out, batch, head, g_b, g_h), start, g_t)
    q = load_rows(q_base, q_t, n_queries - start, M, D, BLOCK_D, True)
    g = load_rows(g_base, g_t, n_queries - start, M, D, BLOCK_D, True)
    position = (batch.to(tl.int64) * n_heads + head) * 2 * n_queries
    offset = _load_offset(stats + position, rows, start, n_queries)
    delta = _load_delta(stats + position, rows, start, n_queries)
    if not SOFTCAP:
        offset *= multiplier
    k_base = head_base(key, batch, head // group, k_b, k_h)
    v_base = head_base(value, batch, head // group, v_b, v_h)
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    acc = _key_tiles(
        acc, q, g, offset, delta, k_base, v_base, k_t, v_t, n_keys,
        rows, rows, rows, rows, rows, identity,
        runs, full_run, full_tiles, inner, multiplier,
        True, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST,
    )  # fmt: skip
    lo1, length1, lo2, length2 = load_bounds(bounds + mask * 4 * n_queries, rows, start, n_queries)
    kinds = rows
    if BITS:
        kinds = tl.load(
            attend + mask * n_queries + start + rows, mask=start + rows < n_queries, other=0
        )
    acc = _key_tiles(
        acc, q, g, offset, delta, k_base, v_base, k_t, v_t, n_keys,
        lo1[:, None], length1[:, None], lo2[:, None], length2[:, None], kinds[:, None],
        identity + mask * n_keys,
        runs, partial_run, partial_tiles, inner, multiplier,
        False, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST,
    )  # fmt: skip
    acc = acc * scale
    slot = item_slot(item)
    if slot < 0:
        dq_base = row_base(head_base(grad_query, batch, head, dq_b, dq_h), start, dq_t)
        store_rows(dq_base, acc, dq_t, n_queries - start, M, D, BLOCK_D)
    else:
        part = slot_base(part_grad, slot, head, n_heads, M, BLOCK_D)
        tl.store(part + slot_offsets(M, BLOCK_D), acc)


@triton.jit
def _query_tiles(
    acc_key, acc_value, key, value, keys, identity,
    query, grad_out, stats, q_h, q_t, g_h, g_t, group, n_queries,
    bounds, attend,
    runs, first_run, n_tiles, inner, multiplier,
    FULL: tl.constexpr, BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    FOR_KEY: tl.constexpr, FOR_VALUE: tl.constexpr,
):  # fmt: skip
    """Add to ``acc_key`` and ``acc_value`` (N, D) what ``n_tiles`` tiles of query rows of every
    head of the group give; scores are (N, M). One loop over heads and tiles, so that loads
    stay pipelined from one head to the next."""
    rows = tl.arange(0, M)
    run, left, head = first_run, n_tiles, 0
    block, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    for _ in range(n_tiles * group):
        start = block * M
        q_base = row_base(query + tl.cast(head, tl.int64) * q_h * UNIT, start, q_t)
        g_base = row_base(grad_out + tl.cast(head, tl.int64) * g_h * UNIT, start, g_t)
        q = load_rows(q_base, q_t, n_queries - start, M, D, BLOCK_D, not FULL)
        g = load_rows(g_base, g_t, n_queries - start, M, D, BLOCK_D, not FULL)
        position = tl.cast(head, tl.int64) * 2 * n_queries
        offset = _load_offset(stats + position, rows, start, n_queries)
        # What is subtracted per row starts the accumulators: along this axis every thread
        # would hold a register per row for it.
        start_scores = tl.zeros((key.shape[0], M), tl.float32)
        if SOFTCAP:
            scores = capped(dot(key, tl.trans(q), start_scores, PRECISION, UPCAST), inner, True)
            exponents = scores * multiplier - offset[None, :]
        else:
            start_scores -= offset[None, :]
            scores = dot(key, tl.trans(q), start_scores, PRECISION, UPCAST)
            exponents = scores * multiplier
        if not FULL:
            lo1, length1, lo2, length2 = load_bounds(bounds, rows, start, n_queries)
            kinds = rows
            if BITS:
                kinds = tl.load(attend + start + rows, mask=start + rows < n_queries, other=0)
            seen = visible(
                keys, lo1[None, :], length1[None, :], lo2[None, :], length2[None, :],
                kinds[None, :], identity, BITS,
            )  # fmt: skip
            exponents = tl.where(seen, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        if FOR_VALUE:
            acc_value = dot(weights.to(g.dtype), g, acc_value, PRECISION, UPCAST)
        if FOR_KEY:
            delta = _load_delta(stats + position, rows, start, n_queries)
            start_grad = tl.zeros((key.shape[0], M), tl.float32) - delta[None, :]
            weights = _slope(scores, weights, SOFTCAP)
            grad_weights = dot(value, tl.trans(g), start_grad, PRECISION, UPCAST)
            grad_scores = weights * grad_weights
            acc_key = dot(grad_scores.to(q.dtype), q, acc_key, PRECISION, UPCAST)
        # The next tile, or the first one for the next head.
        left -= 1
        again = left == 0
        run, block, stop = next_block(runs, run, block, stop)
        run = tl.where(again, first_run, run)
        block = tl.where(again, tl.load(runs + 2 * run), block)
        stop = tl.where(again, tl.load(runs + 2 * run + 1), stop)
        left = tl.where(again, n_tiles, left)
        head += again.to(tl.int32)
    return acc_key, acc_value


@triton.jit(do_not_specialize=[
    "n_items", "head_span", "group", "n_heads", "n_queries", "n_keys",
    "q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "v_b", "v_h", "v_t", "g_b", "g_h", "g_t",
    "dk_b", "dk_h", "dk_t", "dv_b", "dv_h", "dv_t",
])  # fmt: skip
def attention_backward_key(
    query, key, value, grad_out, stats, grad_key, grad_value, part_key, part_value,
    bounds, attend, identity, items, runs,
    inner, multiplier, scale,
    n_items, head_span, group, n_heads, n_queries, n_keys,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    FOR_KEY: tl.constexpr, FOR_VALUE: tl.constexpr,
):  # fmt: skip
    """Gradients of a block of keys (FOR_KEY) and values (FOR_VALUE) over the tiles of one work
    item; ``n_heads`` and the programs' heads are those of keys."""
    item, head = work_item(items, n_items, head_span)
    mask, batch, block = item_block(item)
    full_run, full_tiles = item_tiles(item, True)
    partial_run, partial_tiles = item_tiles(item, False)
    start = block * N
    keys = start + tl.arange(0, N)
    k_base = row_base(head_base(key, batch, head, k_b, k_h), start, k_t)
    v_base = row_base(head_base(value, batch, head, v_b, v_h), start, v_t)
    k = load_rows(k_base, k_t, n_keys - start, N, D, BLOCK_D, True)
    v = load_rows(v_base, v_t, n_keys - start, N, D, BLOCK_D, True)
    q_base = head_base(query, batch, head * group, q_b, q_h)
    g_base = head_base(grad_out, batch, head * group, g_b, g_h)
    position = (batch.to(tl.int64) * n_heads + head) * group * 2 * n_queries
    acc_key = tl.zeros((N, BLOCK_D), tl.float32)
    acc_value = tl.zeros((N, BLOCK_D), tl.float32)
    acc_key, acc_value = _query_tiles(
        acc_key, acc_value, k, v, keys, keys,
        q_base, g_base, stats + position, q_h, q_t, g_h, g_t, group, n_queries,
        bounds, attend,
        runs, full_run, full_tiles, inner, multiplier,
        True, BITS, SOFTCAP, D, BLOCK_D, M, PRECISION, UPCAST, FOR_KEY, FOR_VALUE,
    )  # fmt: skip
    kinds = keys
    if BITS:
        kinds = tl.load(identity + mask * n_keys + keys, mask=keys < n_keys, other=0)
    acc_key, acc_value = _query_tiles(
        acc_key, acc_value, k, v, keys[:, None], kinds[:, None],
        q_base, g_base, stats + position, q_h, q_t, g_h, g_t, group, n_queries,
        bounds + mask * 4 * n_queries, attend + mask * n_queries,
        runs, partial_run, partial_tiles, inner, multiplier,
        False, BITS, SOFTCAP, D, BLOCK_D, M, PRECISION, UPCAST, FOR_KEY, FOR_VALUE,
    )  # fmt: skip
    slot = item_slot(item)
    offsets = slot_offsets(N, BLOCK_D)
    if FOR_KEY:
        acc_key = acc_key * scale
        if slot < 0:
            dk_base = row_base(head_base(grad_key, batch, head, dk_b, dk_h), start, dk_t)
            store_rows(dk_base, acc_key, dk_t, n_keys - start, N, D, BLOCK_D)
        else:
            tl.store(slot_base(part_key, slot, head, n_heads, N, BLOCK_D) + offsets, acc_key)
    if FOR_VALUE:
        if slot < 0:
            dv_base = row_base(head_base(grad_value, batch, head, dv_b, dv_h), start, dv_t)
            store_rows(dv_base, acc_value, dv_t, n_keys - start, N, D, BLOCK_D)
        else:
            tl.store(slot_base(part_value, slot, head, n_heads, N, BLOCK_D) + offsets, acc_value)


@triton.jit(do_not_specialize=["n_heads", "n_rows", "o_b", "o_h", "o_t"])
def merge_backward(
    parts, out, merges,
    n_heads, n_rows, o_b, o_h, o_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the parts of a block's gradient, ROWS rows per program, in slot order."""
    batch, head, block, chunk, first, n_slots = merge_block(merges, n_heads, M // ROWS)
    chunk *= ROWS
    start = block * M + chunk
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    for i in range(n_slots):
        at = ((first + i).to(tl.int64) * n_heads + head) * M + chunk
        acc += tl.load(parts + at * BLOCK_D + slot_offsets(ROWS, BLOCK_D))
    o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
    store_rows(o_base, acc, o_t, n_rows - start, ROWS, D, BLOCK_D)
