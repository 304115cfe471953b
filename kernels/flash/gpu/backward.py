"""Backward attention kernels (FlashAttention-2).

One kernel iterates over runs of key blocks for the query's gradient. Another iterates over runs of
query blocks, and over the query heads of a group, for the gradients of keys and values. They
compute three and four products per tile. Every sum has a fixed order, so two runs are bitwise
equal. For the legend and helpers see ``ops.py``.

With FOR_QUERY the second kernel also adds each tile's contribution to the query's gradient: five
products in total, as nothing is computed twice. Programs add in the order in which they arrive, so
two runs differ in the last bits. (Waiting for a turn would fix the order, but the waiting loop
keeps Triton from prefetching tiles, and registers spill.)
"""

# Kernels are called with plain numbers and bools for tl.constexpr, which Triton's types reject.
# ``tl.range`` is not typed as an iterator.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from raymm.kernels.flash.gpu.ops import (
    UNIT,
    capped,
    dot,
    filled,
    head_base,
    item_block,
    item_slot,
    item_tiles,
    load_bounds,
    load_rows,
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


@triton.jit(do_not_specialize=[
    "n_heads", "n_queries", "o_b", "o_h", "o_t", "g_b", "g_h", "g_t",
])  # fmt: skip
def row_statistics(
    out, grad_out, lse, stats, factor,
    n_heads, n_queries, o_b, o_h, o_t, g_b, g_h, g_t,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute what the other kernels subtract per row: stats (B, Hq, 2, Tq padded). From scores
    they subtract ``factor`` x LSE, which is +inf, so that all weights are 0, for padding and for
    rows that see no key; from gradients of weights, rowsum(grad_out * out)."""
    n_rows = filled(n_queries)
    blocks = n_rows // ROWS
    start = (tl.program_id(0) % blocks) * ROWS
    head = (tl.program_id(0) // blocks) % n_heads
    batch = tl.program_id(0) // (blocks * n_heads)
    rows = tl.arange(0, ROWS)
    valid = start + rows < n_queries
    o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
    g_base = row_base(head_base(grad_out, batch, head, g_b, g_h), start, g_t)
    o = load_rows(o_base, o_t, n_queries - start, ROWS, D, BLOCK_D, True)
    g = load_rows(g_base, g_t, n_queries - start, ROWS, D, BLOCK_D, True)
    position = (batch.to(tl.int64) * n_heads + head) * n_queries
    row_lse = tl.load(lse + position + start + rows, mask=valid, other=float("-inf"))
    offset = tl.where(row_lse == float("-inf"), float("inf"), row_lse * factor)
    pointers = stats + (batch.to(tl.int64) * n_heads + head) * 2 * n_rows + start + rows
    tl.store(pointers, offset)
    tl.store(pointers + n_rows, tl.sum(o.to(tl.float32) * g.to(tl.float32), 1))


@triton.jit
def _slope(scores, weights, SOFTCAP: tl.constexpr):
    """Return weights times the derivative of the softcap (``scores`` are the tanh). Applied before
    the next product starts, so that scores occupy no registers during it."""
    if SOFTCAP:
        weights = weights * (1.0 - scores * scores)
    return weights


@triton.jit
def _key_tiles(
    acc, query, grad_out, offset, delta,
    key, value, batch, key_head, k_t, v_t, n_keys,
    lo1, length1, lo2, length2, attend, identity,
    runs, run, n_tiles, inner, multiplier,
    FULL: tl.constexpr, BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Add to ``acc`` (M, D) the contribution of ``n_tiles`` tiles of keys, starting at ``run``."""
    columns = tl.arange(0, N)
    block, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    for _ in tl.range(n_tiles, disable_licm=TMA):
        start = block * N
        k = load_tile(key, batch, key_head, start, k_t, n_keys, N, D, BLOCK_D, not FULL, TMA)
        v = load_tile(value, batch, key_head, start, v_t, n_keys, N, D, BLOCK_D, not FULL, TMA)
        zeros = tl.zeros((query.shape[0], N), tl.float32)
        scores = capped(dot(query, tl.trans(k), zeros, PRECISION, UPCAST), inner, SOFTCAP)
        exponents = scores * multiplier - offset[:, None]
        if not FULL:
            keys = start + columns
            kinds = keys
            if BITS:
                kinds = tl.load(identity + keys)
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
    TMA: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of a block of query rows over the tiles of one work item."""
    item, head = work_item(items, n_items, head_span)
    mask, batch, block = item_block(item)
    full_run, full_tiles = item_tiles(item, True)
    partial_run, partial_tiles = item_tiles(item, False)
    start = block * M
    rows = tl.arange(0, M)
    key_head = head // group
    if not TMA:
        query = head_base(query, batch, head, q_b, q_h)
        grad_out = head_base(grad_out, batch, head, g_b, g_h)
        key = head_base(key, batch, key_head, k_b, k_h)
        value = head_base(value, batch, key_head, v_b, v_h)
    q = load_tile(query, batch, head, start, q_t, n_queries, M, D, BLOCK_D, True, TMA)
    g = load_tile(grad_out, batch, head, start, g_t, n_queries, M, D, BLOCK_D, True, TMA)
    n_rows = filled(n_queries)
    position = (batch.to(tl.int64) * n_heads + head) * 2 * n_rows
    offset = tl.load(stats + position + start + rows)
    delta = tl.load(stats + position + n_rows + start + rows)
    if not SOFTCAP:
        offset *= multiplier
    acc = tl.zeros((M, BLOCK_D), tl.float32)
    acc = _key_tiles(
        acc, q, g, offset, delta, key, value, batch, key_head, k_t, v_t, n_keys,
        rows, rows, rows, rows, rows, identity,
        runs, full_run, full_tiles, inner, multiplier,
        True, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST, TMA,
    )  # fmt: skip
    lo1, length1, lo2, length2 = load_bounds(bounds + mask * 4 * n_rows, rows, start, n_rows)
    kinds = rows
    if BITS:
        kinds = tl.load(attend + mask * n_rows + start + rows)
    acc = _key_tiles(
        acc, q, g, offset, delta, key, value, batch, key_head, k_t, v_t, n_keys,
        lo1[:, None], length1[:, None], lo2[:, None], length2[:, None], kinds[:, None],
        identity + mask * filled(n_keys),
        runs, partial_run, partial_tiles, inner, multiplier,
        False, BITS, SOFTCAP, D, BLOCK_D, N, PRECISION, UPCAST, TMA,
    )  # fmt: skip
    acc = acc * scale
    slot = item_slot(item)
    if slot < 0:
        dq_base = row_base(head_base(grad_query, batch, head, dq_b, dq_h), start, dq_t)
        store_rows(dq_base, acc, dq_t, n_queries - start, M, D, BLOCK_D)
    else:
        base = slot_base(part_grad, slot, head, n_heads, M, BLOCK_D)
        tl.store(base + slot_offsets(M, BLOCK_D), acc)


@triton.jit
def _add_rows(
    sums, part, batch, head, n_heads, start, n_rows, TMA: tl.constexpr, UPCAST: tl.constexpr
):
    """Add to the rows of one head, starting at ``start``, in any order. ``sums`` is (B, Hq, Tq
    padded, BLOCK_D) fp32, or its descriptor, which the interpreter (UPCAST) cannot add to."""
    if TMA and not UPCAST:
        sums.atomic_add(
            [batch, head, start, 0], tl.reshape(part, (1, 1, part.shape[0], part.shape[1]))
        )
    else:
        columns = tl.arange(0, part.shape[1])
        first = (batch.to(tl.int64) * n_heads + head) * n_rows + start
        pointers = sums + (first + tl.arange(0, part.shape[0]))[:, None] * part.shape[1]
        tl.atomic_add(pointers + columns[None, :], part, sem="relaxed")


@triton.jit
def _query_tiles(
    acc_key, acc_value, key, value, keys, identity,
    query, grad_out, sums, stats, batch, first_head, n_heads, q_h, q_t, g_h, g_t, group, n_queries,
    bounds, attend,
    runs, first_run, n_tiles, inner, multiplier,
    FULL: tl.constexpr, BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    FOR_KEY: tl.constexpr, FOR_VALUE: tl.constexpr, FOR_QUERY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Add to ``acc_key`` and ``acc_value`` (N, D) the contribution of ``n_tiles`` tiles of query
    rows for every head of the group; scores are (N, M). Heads and tiles are one loop, so that loads
    stay pipelined across heads."""
    rows = tl.arange(0, M)
    n_rows = filled(n_queries)
    run, tiles_left, head = first_run, n_tiles, 0
    block, stop = tl.load(runs + 2 * run), tl.load(runs + 2 * run + 1)
    for _ in tl.range(n_tiles * group, disable_licm=TMA):
        start = block * M
        q_head, g_head = query, grad_out
        if not TMA:
            q_head = query + tl.cast(head, tl.int64) * q_h * UNIT
            g_head = grad_out + tl.cast(head, tl.int64) * g_h * UNIT
        query_head = first_head + head
        q = load_tile(
            q_head, batch, query_head, start, q_t, n_queries, M, D, BLOCK_D, not FULL, TMA
        )  # fmt: skip
        g = load_tile(
            g_head, batch, query_head, start, g_t, n_queries, M, D, BLOCK_D, not FULL, TMA
        )  # fmt: skip
        position = tl.cast(head, tl.int64) * 2 * n_rows
        offset = tl.load(stats + position + start + rows)
        # The accumulators start from the values that are subtracted per row: along this axis, every
        # thread would need a register per row to subtract them later. But the assembler of Triton
        # 3.5 and 3.6 waits for all products in flight before it writes such accumulators, so
        # products start from zeros if there are enough registers (AFTER).
        AFTER: tl.constexpr = TMA and not (FOR_QUERY or SOFTCAP)  # pyright: ignore
        start_scores = tl.zeros((key.shape[0], M), tl.float32)
        if SOFTCAP:
            scores = capped(dot(key, tl.trans(q), start_scores, PRECISION, UPCAST), inner, True)
            exponents = scores * multiplier - offset[None, :]
        elif AFTER:
            scores = dot(key, tl.trans(q), start_scores, PRECISION, UPCAST)
            exponents = (scores - offset[None, :]) * multiplier
        else:
            start_scores -= offset[None, :]
            scores = dot(key, tl.trans(q), start_scores, PRECISION, UPCAST)
            exponents = scores * multiplier
        if not FULL:
            lo1, length1, lo2, length2 = load_bounds(bounds, rows, start, n_rows)
            kinds = rows
            if BITS:
                kinds = tl.load(attend + start + rows)
            seen = visible(
                keys, lo1[None, :], length1[None, :], lo2[None, :], length2[None, :],
                kinds[None, :], identity, BITS,
            )  # fmt: skip
            exponents = tl.where(seen, exponents, float("-inf"))
        weights = tl.exp2(exponents)
        if FOR_VALUE:
            acc_value = dot(weights.to(g.dtype), g, acc_value, PRECISION, UPCAST)
        if FOR_KEY:
            delta = tl.load(stats + position + n_rows + start + rows)
            start_grad = tl.zeros((key.shape[0], M), tl.float32)
            if not AFTER:
                start_grad -= delta[None, :]
            weights = _slope(scores, weights, SOFTCAP)
            grad_weights = dot(value, tl.trans(g), start_grad, PRECISION, UPCAST)
            if AFTER:
                grad_weights -= delta[None, :]
            grad_scores = weights * grad_weights
            grad_scores = grad_scores.to(q.dtype)
            acc_key = dot(grad_scores, q, acc_key, PRECISION, UPCAST)
            if FOR_QUERY:
                zeros = tl.zeros((M, BLOCK_D), tl.float32)
                row_grad = dot(tl.trans(grad_scores), key, zeros, PRECISION, UPCAST)
                _add_rows(
                    sums, row_grad, batch, query_head, group * n_heads, start, n_rows, TMA, UPCAST
                )
        # Advance to the next tile, or to the first tile for the next head.
        tiles_left -= 1
        next_head = tiles_left == 0
        run, block, stop = next_block(runs, run, block, stop)
        run = tl.where(next_head, first_run, run)
        block = tl.where(next_head, tl.load(runs + 2 * run), block)
        stop = tl.where(next_head, tl.load(runs + 2 * run + 1), stop)
        tiles_left = tl.where(next_head, n_tiles, tiles_left)
        head += next_head.to(tl.int32)
    return acc_key, acc_value


@triton.jit(do_not_specialize=[
    "n_items", "head_span", "group", "n_heads", "n_queries", "n_keys",
    "q_b", "q_h", "q_t", "k_b", "k_h", "k_t", "v_b", "v_h", "v_t", "g_b", "g_h", "g_t",
    "dk_b", "dk_h", "dk_t", "dv_b", "dv_h", "dv_t",
])  # fmt: skip
def attention_backward_key(
    query, key, value, grad_out, stats, sums, grad_key, grad_value, part_key, part_value,
    bounds, attend, identity, items, runs,
    inner, multiplier, scale,
    n_items, head_span, group, n_heads, n_queries, n_keys,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    dk_b, dk_h, dk_t, dv_b, dv_h, dv_t,
    BITS: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
    FOR_KEY: tl.constexpr, FOR_VALUE: tl.constexpr, FOR_QUERY: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a block of keys (FOR_KEY) and values (FOR_VALUE) over the tiles of
    one work item. With FOR_QUERY, also add the tiles' contributions to the query's gradient in
    ``sums``, before ``scale``. ``n_heads`` and the programs' heads are those of keys."""
    item, head = work_item(items, n_items, head_span)
    mask, batch, block = item_block(item)
    full_run, full_tiles = item_tiles(item, True)
    partial_run, partial_tiles = item_tiles(item, False)
    start = block * N
    keys = start + tl.arange(0, N)
    first_head = head * group
    if not TMA:
        key = head_base(key, batch, head, k_b, k_h)
        value = head_base(value, batch, head, v_b, v_h)
        query = head_base(query, batch, first_head, q_b, q_h)
        grad_out = head_base(grad_out, batch, first_head, g_b, g_h)
    k = load_tile(key, batch, head, start, k_t, n_keys, N, D, BLOCK_D, True, TMA)
    v = load_tile(value, batch, head, start, v_t, n_keys, N, D, BLOCK_D, True, TMA)
    n_rows = filled(n_queries)
    position = (batch.to(tl.int64) * n_heads + head) * group * 2 * n_rows
    acc_key = tl.zeros((N, BLOCK_D), tl.float32)
    acc_value = tl.zeros((N, BLOCK_D), tl.float32)
    acc_key, acc_value = _query_tiles(
        acc_key, acc_value, k, v, keys, keys,
        query, grad_out, sums, stats + position, batch, first_head, n_heads, q_h, q_t, g_h, g_t,
        group, n_queries,
        bounds, attend,
        runs, full_run, full_tiles, inner, multiplier,
        True, BITS, SOFTCAP, D, BLOCK_D, M, PRECISION, UPCAST, FOR_KEY, FOR_VALUE,
        FOR_QUERY, TMA,
    )  # fmt: skip
    kinds = keys
    if BITS:
        kinds = tl.load(identity + mask * filled(n_keys) + keys)
    acc_key, acc_value = _query_tiles(
        acc_key, acc_value, k, v, keys[:, None], kinds[:, None],
        query, grad_out, sums, stats + position, batch, first_head, n_heads, q_h, q_t, g_h, g_t,
        group, n_queries,
        bounds + mask * 4 * n_rows, attend + mask * n_rows,
        runs, partial_run, partial_tiles, inner, multiplier,
        False, BITS, SOFTCAP, D, BLOCK_D, M, PRECISION, UPCAST, FOR_KEY, FOR_VALUE,
        FOR_QUERY, TMA,
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
        slot_row = ((first + i).to(tl.int64) * n_heads + head) * M + chunk
        acc += tl.load(parts + slot_row * BLOCK_D + slot_offsets(ROWS, BLOCK_D))
    o_base = row_base(head_base(out, batch, head, o_b, o_h), start, o_t)
    store_rows(o_base, acc, o_t, n_rows - start, ROWS, D, BLOCK_D)
