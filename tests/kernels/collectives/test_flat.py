"""Flat tensors are gathered from shards, and their sums are scattered to shards."""

from __future__ import annotations

import pytest
import torch

from raymm.kernels.collectives.flat import gather_shares, scatter_sum


def values(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) * 10 + rank


def gathered(group, count):
    return gather_shares(values(group.rank(), count), group)


def scattered(group, count, share):
    return scatter_sum(values(group.rank(), count), share, group)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_shards_are_concatenated_by_rank(processes, count):
    for result in processes.run(gathered, 3, count=count):
        assert torch.equal(result, torch.cat([values(rank, count) for rank in range(3)]))


@pytest.mark.parametrize("count, share", [(6, 2), (7, 3), (2, 1), (0, 2)])
def test_sums_are_split_and_padded_with_zeros(processes, count, share):
    total = torch.zeros(3 * share)
    total[:count] = sum(values(rank, count) for rank in range(3))
    assert torch.equal(torch.cat(processes.run(scattered, 3, count=count, share=share)), total)
