"""Gradients of shared parameters on one rank; across ranks the parity suite has them."""

import pytest
import torch
from torch import nn

from raymm.actors.optimizer import (
    OptimizerConfig,
    RankOptimizer,
    SharedParameter,
    reduce_in_buckets,
)


def optimizer_of(*gradients: tuple[float | None, ...]) -> RankOptimizer:
    """One shared parameter per tuple, with as many holders as it has entries."""
    parameters, shared = {}, []
    for number, values in enumerate(gradients):
        holders = tuple((f"vision.0@{k}", str(number)) for k in range(len(values)))
        for holder, value in zip(holders, values, strict=True):
            parameters[holder] = parameter = nn.Parameter(torch.ones(2))
            parameter.grad = None if value is None else torch.full((2,), value)
        shared.append(SharedParameter(holders, (0,)))
    return RankOptimizer(
        parameters, OptimizerConfig(), tuple(shared), (None,) * len(shared), torch.device("cpu")
    )


def test_all_holders_get_the_sum_and_none_stays_none():
    optimizer = optimizer_of((1.0, 2.0), (None, 4.0, 1.0), (None, None))
    optimizer.reduce_tied()
    found = {key: p.grad for key, p in optimizer.parameters.items()}
    for (_, number), gradient in found.items():
        if number == "2":
            assert gradient is None
        else:
            assert gradient.tolist() == [3.0 if number == "0" else 5.0] * 2
    present = [g for g in found.values() if g is not None]
    assert len({g.data_ptr() for g in present}) == len(present)
    assert optimizer.clip() == pytest.approx((2 * 9 + 2 * 25) ** 0.5)  # each counted once
    optimizer.step()
    assert all(p.equal(torch.ones(2)) == (key[1] == "2") for key, p in optimizer.parameters.items())


@pytest.mark.parametrize("limit", [1, 60, 10**6])
def test_buckets(limit):
    """Mixed dtypes, a tensor that is not contiguous, an empty one, one larger than a bucket."""
    tensors = [
        torch.randn(5), torch.randn(3, 4).t(), torch.randn(2, 3).double(), torch.randn(0, 4),
        torch.randn(40), torch.randn(1).bfloat16(),
    ]
    expected = [t.clone() * 2 for t in tensors]
    sizes = []

    def double(flat):
        sizes.append(flat.nbytes)
        flat.mul_(2)

    reduce_in_buckets(tensors, double, limit)
    assert all(mine.equal(due) for mine, due in zip(tensors, expected, strict=True))
    assert sum(sizes) == sum(t.nbytes for t in tensors)
    assert all(size <= limit or size in [t.nbytes for t in tensors] for size in sizes)
