"""Messages within a group arrive once, are counted, and pass around a ring."""

from __future__ import annotations

import pytest
import torch

from raymm.kernels.collectives.p2p import Exchange, carousel


def ring(group):
    """Send (rank,) and an empty tensor to the next rank; return what arrives and the bytes."""
    exchange = Exchange(group)
    after, before = (exchange.rank + 1) % exchange.size, (exchange.rank - 1) % exchange.size
    sends = [(after, torch.full((3,), float(exchange.rank))), (after, torch.empty(0, 4))]
    shapes = [(before, ((3,), torch.float32)), (before, ((0, 4), torch.float32))]
    received = exchange.start(sends, shapes, torch.device("cpu")).wait()
    return [tensor.tolist() for tensor in received], exchange.sent_bytes


def test_messages_arrive_and_only_payload_is_counted(processes):
    for rank, (received, nbytes) in enumerate(processes.run(ring, 3)):
        assert received == [[float((rank - 1) % 3)] * 3, []]
        assert nbytes == 3 * 4


def visited(group, results):
    """Pass 10 + rank around; return the visits, and the results for this rank's payload."""
    exchange = Exchange(group)
    seen = []

    def visit(owner, payload):
        seen.append((owner, payload[0].tolist()))
        return [payload[0] * (exchange.rank + 1)] if results else []

    def shapes(rank):
        return [((rank + 1,), torch.float32)]

    own, others = carousel(
        exchange, [torch.full((exchange.rank + 1,), 10.0 + exchange.rank)], shapes, visit,
        shapes if results else lambda rank: [], lambda a, b: [a[0] + b[0]],
    )
    return seen, [t.tolist() for t in own], others and [t.tolist() for t in others]


@pytest.mark.parametrize("results", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_carousel_visits_every_rank_and_returns_results(processes, ranks, results):
    for rank, (seen, own, others) in enumerate(processes.run(visited, ranks, results=results)):
        owners = [(rank - hop) % ranks for hop in range(ranks)]
        assert seen == [(owner, [10.0 + owner] * (owner + 1)) for owner in owners]
        if not results:
            assert own == [] and not others
            continue
        value = 10.0 + rank
        assert own == [[value * (rank + 1)] * (rank + 1)]
        elsewhere = sum(other + 1 for other in range(ranks) if other != rank)
        assert others == ([[value * elsewhere] * (rank + 1)] if ranks > 1 else None)
