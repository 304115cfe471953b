"""Kernels of torch's library: the masks that they support, and their results."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.choice import library
from raymm.kernels.choice.library import (
    library_kernels,
    plain_form,
    sdpa_attention,
    varlen_attention,
)
from raymm.kernels.flash.cpu.attention import cpu_attention
from raymm.kernels.mask import patterns
from tests.kernels.choice.test_choice import tensors

PLAIN = {
    "full": patterns.full(57), "causal": patterns.causal(57),
    "causal_window": patterns.causal(57, 5),
    "causal_documents": patterns.documents([20, 30, 7]),
    "full_documents": patterns.documents([20, 30, 7], causal=False),
    "causal_documents_window": patterns.documents([20, 30, 7]).windowed(9),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_masks_are_recognized(name):
    mask = PLAIN[name]
    form = plain_form(mask)
    assert form is not None and form.name == name
    lengths = (20, 30, 7) if "documents" in name else (57,)
    assert form.lengths == lengths and form.causal == name.startswith("causal")
    assert form.window == {"causal_window": 5, "causal_documents_window": 9}.get(name)


def test_other_masks_are_not_plain():
    plain = {key for key, make in every_pattern(57).items() if plain_form(make()) is not None}
    for key in plain:
        form, mask = plain_form(every_pattern(57)[key]()), every_pattern(57)[key]()
        rebuilt = patterns.documents(form.lengths, causal=form.causal)
        rebuilt = rebuilt if form.window is None else rebuilt.windowed(form.window)
        assert torch.equal(rebuilt.dense(), mask.dense()), key
    assert "causal" in plain and not {"ee", "mp_window", "own_image"} & plain
    assert plain_form(patterns.full(5, 7)) is None


def varlen_by_sdpa(
    query, key, value, ends, key_ends, longest, longest_key, *, scale, window_size, enable_gqa
):
    """Compute torch's ``varlen_attn``, which CPUs lack, document by document."""
    assert torch.equal(ends, key_ends) and longest == longest_key == int(ends.diff().max())
    outputs = []
    for start, stop in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        row, column = torch.arange(stop - start)[:, None], torch.arange(stop - start)
        left, right = window_size
        visible = torch.ones(len(row), len(row), dtype=torch.bool)
        visible &= (column >= row - left) if left >= 0 else True
        visible &= (column <= row + right) if right >= 0 else True
        document = (t[start:stop].transpose(0, 1)[None] for t in (query, key, value))
        out = torch.nn.functional.scaled_dot_product_attention(
            *document, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("kernel, name", [
    ("sdpa", "full"), ("sdpa", "causal"), *(("varlen", name) for name in PLAIN)
])  # fmt: skip
@pytest.mark.parametrize("dtype, bound", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_kernels_of_libraries_equal_raymms(monkeypatch, kernel, name, dtype, bound):
    """Compare outputs and gradients; in bf16 with fp32 of the same inputs."""
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr(varlen, "varlen_attn", varlen_by_sdpa)
    monkeypatch.setattr(library, "_activate_newest", lambda: None)
    other = PLAIN[name]
    if "documents" in name:  # other documents in the second row
        other = patterns.documents([50, 7], causal=name.startswith("causal"))
        other = other.windowed(9) if "window" in name else other
    batch = (PLAIN[name], other)
    assert kernel in library_kernels(batch, None)
    given = [torch.cat([t, t.flip(2)]).to(dtype) for t in tensors(57)]
    attend = {"sdpa": sdpa_attention, "varlen": varlen_attention}[kernel]

    def outcome(attend, inputs):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        out = attend(*leaves, batch, scale=0.3, softcap=None)[0]
        weights = torch.arange(out.numel(), dtype=torch.float32).sin().view(out.shape)
        return [out, *torch.autograd.grad(out, leaves, weights.to(out.dtype))]

    expected = outcome(cpu_attention, [t.float() for t in given])
    for found, exact in zip(outcome(attend, given), expected, strict=True):
        assert found.dtype == dtype
        assert float((found.float() - exact).norm() / exact.norm()) < bound


def test_library_kernels_are_refused_where_they_compute_something_else():
    plain, packed = patterns.causal(40), patterns.documents([20, 20])
    assert list(library_kernels((plain, plain), None)) == ["sdpa", "varlen"]
    assert list(library_kernels((plain, packed), None)) == ["varlen"]
    assert not library_kernels((plain,), 2.0)
    assert not library_kernels((plain, patterns.full(40)), None)
    with pytest.raises(ValueError, match="expected full or causal masks, got causal_documents"):
        sdpa_attention(*tensors(), (packed,))
    with pytest.raises(ValueError, match="no softcap"):
        varlen_attention(*tensors(), (plain,), softcap=2.0)
