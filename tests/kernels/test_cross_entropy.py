"""Cross entropy by chunks equals torch's in float64, with little fp32 memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from raymm.kernels import cross_entropy
from raymm.kernels.cross_entropy import token_cross_entropy_sum

BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 5e-3, torch.float16: 1e-3}  # relative to the norm


@given(
    tokens=st.integers(0, 9), width=st.integers(1, 12), chunk=st.integers(1, 60),
    dtype=st.sampled_from(list(BOUNDS)), scale=st.sampled_from([1.0, 50.0, 1000.0]),
    seed=st.integers(0, 99),
)
@example(tokens=2, width=4, chunk=1, dtype=torch.float32, scale=50.0, seed=94)
def test_cross_entropy_equals_torch_in_float64(tokens, width, chunk, dtype, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(tokens, width, generator=generator) * scale).to(dtype)
    targets = torch.randint(width, (tokens,), generator=generator)
    exact = logits.double().requires_grad_()
    wanted = F.cross_entropy(exact, targets, reduction="sum")
    (gradient,) = torch.autograd.grad(wanted * 0.5, exact)
    logits.requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_ELEMENTS", chunk)
        found = token_cross_entropy_sum(logits, targets)
        (own,) = torch.autograd.grad(found * 0.5, logits)
    assert found.dtype == torch.float32 and own.dtype == dtype
    assert found.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
    assert (own.double() - gradient).norm() <= BOUNDS[dtype] * gradient.norm() + 1e-7


class _LargestMade(TorchDispatchMode):
    """Elements of the largest fp32 tensor that an operator has created."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and found.dtype == torch.float32:
            self.elements = max(self.elements, found.numel())
        return found


def test_full_logits_never_exist_in_fp32(monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_ELEMENTS", 4 * 50)
    logits = torch.randn(64, 50).bfloat16().requires_grad_()
    targets = torch.randint(50, (64,))
    with _LargestMade() as largest:
        token_cross_entropy_sum(logits, targets).backward()
    assert largest.elements == 4 * 50
    with _LargestMade() as before:
        F.cross_entropy(logits.float(), targets, reduction="sum").backward()
    assert before.elements == 64 * 50
