"""Gathered items of several processes, and the gradients of their sources."""

import pytest
import torch

from raymm.kernels.collectives.gather import gather_items
from raymm.kernels.collectives.p2p import Exchange


def items(count: int) -> torch.Tensor:
    return torch.randn(count, 4, 3, generator=torch.Generator().manual_seed(count))


def gather(group, sizes):
    """Return all items, the gradient of this process's, and that of a shared weight."""
    exchange = Exchange(group)
    start = sum(sizes[: exchange.rank])
    own = items(sum(sizes))[start : start + sizes[exchange.rank]].requires_grad_()
    weight = torch.ones(3, requires_grad=True)
    whole = gather_items(own * weight, sizes, exchange)
    whole.backward(items(sum(sizes)) * 2)
    return whole.detach(), own.grad, weight.grad


@pytest.mark.cells(2)
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (1, 1, 0), (1, 0, 0), (2, 1)])
def test_items_and_gradients(processes, sizes):
    results = processes.run(gather, len(sizes), sizes=sizes)
    whole = items(sum(sizes))
    for gathered, _, _ in results:
        assert torch.equal(gathered, whole)
    assert torch.equal(torch.cat([grad for _, grad, _ in results]), whole * 2)
    total = sum(weight for _, _, weight in results)
    assert torch.allclose(total, (whole * whole * 2).sum((0, 1)))


def too_many(group):
    with pytest.raises(ValueError, match="has 2 items, expected 1"):
        gather_items(torch.zeros(2, 1, 1), (1, 1), Exchange(group))


def test_sizes_that_do_not_fit(processes):
    processes.run(too_many, 2)
