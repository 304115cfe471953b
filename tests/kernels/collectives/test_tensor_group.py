"""Collectives of processes and of threads, compared with dense results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raymm.kernels.collectives.tensor_group import ThreadGroup, thread_groups
from tests.kernels.collectives.test_tensor_parallel import (
    RAGGED,
    as_tensor_group,
    in_threads,
    randn,
)
from tests.support.rank_processes import RankProcesses


def collectives(group: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    group = as_tensor_group(group)
    own = randn(2, 5, seed=group.rank, dtype=dtype)
    part = randn(2, RAGGED[group.rank], 3, seed=group.rank, dtype=dtype)
    total, largest = own.clone(), own.clone()
    assert group.all_reduce(total) is total
    group.all_reduce_max(largest)
    group.all_reduce(own[:0])
    return total, largest, group.all_gather(part, RAGGED, 1), group.all_gather(part, RAGGED, -2)


def check_collectives(results: list[tuple[torch.Tensor, ...]], dtype: torch.dtype) -> None:
    own = torch.stack([randn(2, 5, seed=rank, dtype=dtype) for rank in range(3)])
    parts = [randn(2, size, 3, seed=rank, dtype=dtype) for rank, size in enumerate(RAGGED)]
    whole = torch.cat(parts, 1)
    for total, largest, gathered, same in results:
        tolerance = 1e-6 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(total.float(), own.float().sum(0), rtol=0, atol=4 * tolerance)
        assert torch.equal(total, results[0][0])  # bitwise equal everywhere
        assert torch.equal(largest, own.amax(0))
        assert torch.equal(gathered, whole) and torch.equal(same, whole)
        assert gathered.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_collectives_of_processes(processes: RankProcesses, dtype: torch.dtype) -> None:
    check_collectives(processes.run(collectives, 3, dtype=dtype), dtype)


def test_collectives_of_threads() -> None:
    check_collectives(in_threads(collectives, 3, dtype=torch.float32), torch.float32)


def test_sizes_that_do_not_fit_are_refused() -> None:
    (group,) = thread_groups(1)
    with pytest.raises(ValueError, match="expected one for each of 1 members, and 5"):
        group.all_gather(torch.zeros(2, 5), (4,), -1)


def call_different(group: ThreadGroup) -> None:
    tensor = torch.zeros(2)
    group.all_reduce(tensor) if group.rank else group.all_reduce_max(tensor)


def reduce_different(group: ThreadGroup) -> None:
    group.all_reduce(torch.zeros(2 + group.rank))


def leave_alone(group: ThreadGroup) -> None:
    if group.rank:
        raise RuntimeError("gave up")
    group.all_reduce(torch.zeros(2))


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (call_different, "different operations: max, sum"),
        (reduce_different, "different shapes"),
        (leave_alone, "gave up"),
    ],
)
def test_threads_that_disagree_end_with_an_error(function: Any, error: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=error):
        in_threads(function, 2)
