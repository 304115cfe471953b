"""Rows and counts arrive at their destinations, and gradients return to their sources."""

from __future__ import annotations

import pytest
import torch

from raymm.kernels.collectives.exchange_rows import exchange_counts, exchange_rows

COUNTS = {
    "uneven": [[2, 0, 1], [3, 1, 0], [0, 4, 2]],
    "one process has nothing": [[0, 0, 0], [1, 2, 1], [0, 0, 3]],
    "no rows": [[0, 0, 0]] * 3,
}


def sent_rows(source: int, counts: list[list[int]]) -> list[torch.Tensor]:
    """Return the rows from a process to each destination; values name both."""
    return [
        torch.full((count, 2), 100.0 * source + 10 * to) + torch.arange(count)[:, None]
        for to, count in enumerate(counts[source])
    ]


def exchanged(group, counts):
    """Return the received counts, rows, and the gradient of the sent rows."""
    rank = group.rank()
    received = exchange_counts(torch.tensor(counts[rank])[:, None], group)[:, 0]
    rows = torch.cat(sent_rows(rank, counts)).requires_grad_()
    out = exchange_rows(rows, counts[rank], received.tolist(), group)
    (out * (rank + 1)).sum().backward()
    return received.tolist(), out.detach(), rows.grad


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_and_gradients(processes, counts):
    for rank, (received, rows, gradient) in enumerate(processes.run(exchanged, 3, counts=counts)):
        assert received == [counts[source][rank] for source in range(3)]
        assert torch.equal(
            rows, torch.cat([sent_rows(source, counts)[rank] for source in range(3)])
        )
        expected = [[to + 1.0] * 2 for to, count in enumerate(counts[rank]) for _ in range(count)]
        assert gradient.tolist() == expected
