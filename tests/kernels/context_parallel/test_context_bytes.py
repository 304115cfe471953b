"""Sent bytes of attention equal ``scheduler/context_parallel/traffic.py``, rank by rank."""

from __future__ import annotations

import torch

from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.attention import context_attention
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout, needed_keys
from raymm.kernels.context_parallel.methods import METHODS
from raymm.kernels.mask import patterns
from raymm.scheduler.context_parallel import traffic as attention_traffic
from tests.support.rank_processes import rank_processes

HEAD_DIM = 8


def pairs_on_a_rank(group, cases) -> list:
    """Return counted and predicted bytes, per case and method."""
    exchange, found = Exchange(group), []
    n = exchange.size
    for queries, keys, heads, dtype, sequences, documents in cases:
        rows, columns = ContextLayout(queries), ContextLayout(keys)
        context = ContextGroup(exchange, rows, columns)
        mask = (
            patterns.documents(documents) if documents
            else patterns.full(rows.length, columns.length)
        )
        # Count on the dense mask, not by the function that the exchange uses.
        dense = mask.dense()
        needed = [
            [
                int(dense[rows.positions(r)][:, columns.positions(s)].any(dim=0).sum())
                for s in range(n)
            ]
            for r in range(n)
        ]
        assert documents is None or needed == [
            [
                sum(b - a for a, b in needed_keys((mask,), rows.ranges[r], columns.ranges[s]))
                for s in range(n)
            ]
            for r in range(n)
        ]
        shape = attention_traffic.AttentionShape(
            rows.sizes, columns.sizes, *heads, HEAD_DIM, dtype.itemsize, 4, sequences
        )
        me = group.rank()
        for method in METHODS:
            if method == "ulysses" and (heads[0] % n or heads[1] % n):
                continue
            sizes = (heads[0], rows), (heads[1], columns), (heads[1], columns)
            q, k, v = (
                torch.randn(sequences, h, layout.sizes[me], HEAD_DIM).to(dtype).requires_grad_()
                for h, layout in sizes
            )
            before = exchange.sent_bytes
            out = context_attention(q, k, v, ContextCall(context, [mask]), method=method)
            middle = exchange.sent_bytes
            out.sum().backward()
            counted = middle - before, exchange.sent_bytes - middle
            due = attention_traffic.method_bytes(shape, method, needed)
            found.append((method, counted, (due.forward[me], due.backward[me])))
    return found


def test_sent_bytes_equal_the_formulas():
    """Use ragged layouts, a rank without rows, one without keys, both dtypes, batches, documents.
    """
    assert set(attention_traffic.METHODS) == set(METHODS)
    ragged = (((0, 5), (60, 70)), ((5, 33),), ((33, 34), (40, 60)), ((34, 40),))
    no_rows = (((0, 20),), (), ((20, 22),), ((22, 41),))
    no_keys = (((0, 7), (50, 90)), ((7, 9),), ((9, 50),), ())
    cases = [
        (ragged, ragged, (8, 4), torch.bfloat16, 1, None),
        (ragged, ragged, (4, 4), torch.float32, 2, (12, 30, 28)),
        (no_rows, no_keys, (8, 4), torch.float32, 1, None),
        (no_rows, no_keys, (3, 1), torch.bfloat16, 2, None),
    ]
    with rank_processes(4) as processes:
        for found in processes.run(pairs_on_a_rank, 4, cases=cases):
            assert len(found) == 4 * len(METHODS) - 1
            assert [one for one in found if one[1] != one[2]] == []
