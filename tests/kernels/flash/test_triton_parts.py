"""Triton attention over parts of the keys, merged, equals that over all: what attention over
several processes does on a GPU."""

from __future__ import annotations

import pytest
import torch
from interpreted_triton import NAMES, Case, device, expected, inputs
from random_masks import every_pattern


def part_errors(case: Case, cut: int) -> dict[str, float]:
    """Errors of output, LSE and gradients, from keys before and after ``cut``."""
    from raymm.kernels.context_parallel.partial import merge_partials, output_like, row_delta
    from raymm.kernels.flash.gpu.attention import triton_backward, triton_forward

    query, key, value, grad_out = (t.to(device()) for t in inputs(case))
    scale = case.head_dim**-0.5
    parts = []
    for start, stop in ((0, cut), (cut, key.shape[2])):
        masks = tuple(mask.select_keys([(start, stop)]) for mask in case.masks)
        parts.append((key[:, :, start:stop], value[:, :, start:stop], masks))
    one, other = (triton_forward(query, *part, scale, case.softcap) for part in parts)
    out, lse = merge_partials(*one, *other)
    delta = row_delta(grad_out, out)
    shares = [
        triton_backward(
            grad_out, query, k, v, output_like(grad_out, delta), lse, masks, scale, case.softcap
        )
        for k, v, masks in parts
    ]
    assert all(gradient.dtype == torch.float32 for share in shares for gradient in share)
    dq = shares[0][0] + shares[1][0]
    dk, dv = (torch.cat([share[i] for share in shares], dim=2) for i in (1, 2))
    found = dict(zip(NAMES, (out, lse, dq, dk, dv), strict=True))
    wanted = dict(zip(NAMES, expected(case), strict=True))
    seen = ~torch.isneginf(wanted["lse"])
    assert torch.equal(torch.isneginf(found["lse"].cpu()), ~seen)
    found["lse"], wanted["lse"] = found["lse"].cpu()[seen], wanted["lse"][seen]
    return {
        name: float((found[name].cpu().double() - due).norm() / due.norm())
        for name, due in wanted.items()
    }


@pytest.mark.parametrize("pattern", ["mp_isolated", "own_image_window", "cross"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_parts_merge_to_the_whole(triton_worker, pattern, softcap):
    mask = every_pattern(144)[pattern]()
    case = Case((mask,), heads=(2, 1), softcap=softcap)
    found = triton_worker(part_errors, case, mask.n_keys // 3)
    assert max(found.values()) <= 1e-5, found
