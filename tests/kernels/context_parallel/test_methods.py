"""Every method computes the rows of a rank, and its gradients, like attention in one process."""

from __future__ import annotations

import pytest
import torch

from raymm.kernels.attention import attention
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.context_parallel.call import ContextCall, ContextGroup
from raymm.kernels.context_parallel.layout import ContextLayout
from raymm.kernels.context_parallel.methods import METHODS, WAYS
from raymm.kernels.mask.patterns import documents
from tests.support.rank_processes import rank_processes

LENGTH = 24
LAYOUT = ContextLayout.of_blocks([[0, 3], [1, 2]], 6, LENGTH)
MASK = documents([10, 14])


@pytest.fixture(scope="module")
def processes():
    with rank_processes(2) as running:
        yield running


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, LENGTH, 8, generator=generator) for heads in (4, 2, 2, 4)]


def results(group, method):
    """Return this rank's output and gradients of query, key and value."""
    call = ContextCall(ContextGroup(Exchange(group), LAYOUT, LAYOUT), (MASK,), 8**-0.5)
    rows = LAYOUT.positions(call.group.rank)
    query, key, value, grad_out = (t[:, :, rows] for t in tensors())
    way = WAYS[method]
    out, saved = way.forward(call, query, key, value)
    if way.saves_inputs:
        assert all(a is b for a, b in zip(saved[:3], (query, key, value), strict=True))
    return out, *way.backward(call, grad_out, saved)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_equals_one_process(processes, method):
    *leaves, grad_out = tensors()
    leaves = [t.requires_grad_() for t in leaves]
    out = attention(*leaves, MASK)[0]
    expected = out.detach(), *torch.autograd.grad(out, leaves, grad_out)
    for rank, found in enumerate(processes.run(results, 2, method=method)):
        rows = LAYOUT.positions(rank)
        for one, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(one, whole[:, :, rows], atol=2e-6, rtol=1e-5)
