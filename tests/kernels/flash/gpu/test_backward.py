"""Gradients of the Triton kernels: in any order, only those that are wanted, expanded."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.attention_case import BOUNDS, Case, inputs, options
from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.mask import patterns
from tests.kernels.flash.gpu.test_attention import PATTERNS, check
from tests.support.interpreted_triton import device, errors, run


@pytest.mark.parametrize("pattern", PATTERNS)
def test_gradients_in_any_order(triton_worker, pattern):
    """Compute all gradients in one kernel; sequences of different masks, grouped heads, split rows.
    """
    masks = tuple(every_pattern(53, seed)[pattern]() for seed in range(2))
    case = Case(
        masks, (2, 1), 40, blocks=(16, 32), processors=16, descriptors=True, unordered=True
    )
    check(triton_worker, case)


def _own_blocks_in_any_order(case: Case) -> dict[str, float]:
    """Use the table's launch configurations."""
    from raymm.kernels.flash.gpu.launch_configs import attention_config

    config = attention_config(
        case.head_dim, torch.bfloat16, descriptors=True, unordered=True
    )
    assert config.backward_key.unordered
    return errors(case)


@pytest.mark.parametrize("head_dim", [40, 64, 128])
def test_gradients_in_any_order_with_their_own_blocks(triton_worker, head_dim):
    mask = every_pattern(144)["mp"]()
    case = Case((mask,), (2, 1), head_dim, "bfloat16", unordered=True)
    found = triton_worker(_own_blocks_in_any_order, case)
    assert max(found.values()) <= BOUNDS["bfloat16"], found


def _expanded_gradient(case: Case) -> None:
    """Use the gradient of a sum, whose repeated memory no descriptor supports."""
    from raymm.kernels.flash.gpu.attention import triton_attention

    *tensors, _ = inputs(case)
    found = []
    for dense in (False, True):
        leaf = tensors[0].clone().requires_grad_()
        out, _ = triton_attention(leaf, *tensors[1:], case.masks, **options(case))
        gradient = torch.ones((), dtype=out.dtype).expand(out.shape)
        out.backward(gradient.contiguous() if dense else gradient)
        found.append(leaf.grad)
    assert torch.equal(*found)


def test_expanded_gradients_under_descriptors(triton_worker):
    case = Case((patterns.causal(40),), (2, 1), 40, "bfloat16", blocks=(32, 16), descriptors=True)
    triton_worker(_expanded_gradient, case)


def _some_gradients(case: Case) -> None:
    from raymm.kernels.flash.gpu.attention import triton_attention

    plain = run(case)[2:]
    for wanted in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]:
        *tensors, grad_out = (t.to(device()) for t in inputs(case))
        tensors = [t.requires_grad_(bool(w)) for t, w in zip(tensors, wanted, strict=True)]
        out, lse = triton_attention(*tensors, case.masks, **options(case))
        assert not lse.requires_grad
        out.backward(grad_out)
        for tensor, want, grad in zip(tensors, wanted, plain, strict=True):
            assert (tensor.grad is None) == (not want)
            assert not want or torch.equal(tensor.grad.cpu(), grad)
    out, _ = triton_attention(*(t.detach() for t in tensors), case.masks, **options(case))
    assert not out.requires_grad


def test_only_wanted_gradients(triton_worker):
    mask = every_pattern(100)["ee"]()
    triton_worker(_some_gradients, Case((mask,), (2, 1), blocks=(64, 64)))
