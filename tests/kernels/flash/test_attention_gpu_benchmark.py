"""The GPU benchmark where there is no GPU: masks, FlexAttention's BlockMask, what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import attention_gpu as benchmark


@pytest.mark.parametrize("length", [64, 500, 1000])
def test_flex_gets_the_same_mask(length):
    masks = benchmark.build_masks(length)
    assert set(masks) == {"causal", "window", "document", "ee", "mp"}
    q, k = torch.arange(length)[:, None], torch.arange(length)[None]
    zero = torch.tensor(0)
    for pattern, mask in masks.items():
        dense = mask.dense()
        assert mask.area() == int(dense.sum())
        flex = benchmark.flex_block_mask(pattern, mask, "cpu")
        assert torch.equal(flex.mask_mod(zero, zero, q, k), dense), pattern
        # Blocks: 1 where FlexAttention looks, and full ones, where it applies no test.
        blocks = flex.to_dense()[0, 0].bool()
        whole = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)[:length, :length]
        assert not (dense & ~whole).any()
        full = flex.full_kv_num_blocks[0, 0]
        for row, count in enumerate(full.tolist()):
            for column in flex.full_kv_indices[0, 0, row, :count].tolist():
                tile = dense[row * 128 : (row + 1) * 128, column * 128 : (column + 1) * 128]
                assert tile.all()


def test_masks_of_the_benchmark_are_of_use():
    masks = benchmark.build_masks(8192)
    causal = masks["causal"].area()
    shares = {name: mask.area() / causal for name, mask in masks.items()}
    assert shares["window"] == pytest.approx(0.75, abs=0.01)
    assert 0.1 < shares["document"] < 0.5
    assert masks["ee"].needs_bits and masks["mp"].needs_bits
    assert sum(benchmark.document_lengths(8192)) == 8192


def test_sampled_rows_of_the_oracle(monkeypatch):
    """Rows of the oracle equal those of the whole."""
    from raymm.kernels.flash.reference import reference_attention

    monkeypatch.setattr(benchmark, "QUERY_HEADS", 4)
    monkeypatch.setattr(benchmark, "KEY_HEADS", 2)
    mask = benchmark.build_masks(64)["mp"]
    tensors = [torch.randn(1, h, 64, 16, dtype=torch.float64) for h in (4, 2, 2, 4)]
    leaf = tensors[0].clone().requires_grad_()
    whole, _ = reference_attention(leaf, *tensors[1:3], mask.dense())
    (grad,) = torch.autograd.grad(whole, leaf, tensors[3])
    out, grad_rows = benchmark._oracle(mask, tensors, slice(40, 56))
    torch.testing.assert_close(out, whole[:, :2, 40:56])
    torch.testing.assert_close(grad_rows, grad[:, :2, 40:56])
    outputs = [whole, grad, *tensors[1:3]]
    errors = benchmark._errors(mask, tensors, {"raymm": outputs})
    assert max(errors.values()) < 1e-6
    errors = benchmark._errors(mask, tensors, {"raymm": [whole * 1.1, *outputs[1:]]})
    assert errors["out_rows"] == pytest.approx(0.1, rel=1e-3)


def test_summary():
    row = {"correct": True, "length": 8, "speedup_vs_flex_total": 2.0}
    rows = [row | {"pattern": name} for name in ("document", "ee", "mp")]
    rows.append(row | {"pattern": "ee", "speedup_vs_flex_total": 8.0})
    found = benchmark.summarise(rows)
    assert found["speedup_vs_flex_total_ee"] == 4.0
    assert found["worst_speedup_vs_flex_multimodal"] == 2.0
    assert benchmark.summarise([row | {"correct": False, "pattern": "ee"}])["correct"] is False
    times = {"forward_ms": 1.0, "backward_ms": 2.0, "forward_tflops": 3.0, "backward_tflops": 4.0}
    assert benchmark.show([row | {"pattern": "ee", "raymm": times, "flex": None}]).row_count == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_says_aloud_that_there_is_no_gpu(capsys):
    benchmark.main(["--json", "--lengths", "8192", "--patterns", "ee"])
    printed = capsys.readouterr()
    assert "no CUDA device" in json.loads(printed.out.splitlines()[-1])["skipped"]
    with pytest.raises(SystemExit):
        benchmark.main(["--patterns", "unknown"])
