"""Outputs of the Triton kernels: split rows, rows without keys, softcap and scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu.attention_case import BOUNDS, Case, options
from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask
from tests.kernels.flash.gpu.test_attention import check
from tests.support.interpreted_triton import device, errors, run


@pytest.mark.parametrize("softcap", [2.0, 50.0])
@pytest.mark.parametrize("pattern", ["window", "mp"])
def test_softcap_and_scale(triton_worker, pattern, softcap):
    mask = every_pattern(144)[pattern]()
    case = Case((mask,), (2, 1), scale=0.7, softcap=softcap, blocks=(64, 32))
    check(triton_worker, case)


def test_rows_that_see_nothing(triton_worker):
    nothing = AttentionMask([[0] * 10], [[0, 1]], 70, 50)
    check(triton_worker, Case((nothing, patterns.full(70, 50)), blocks=(32, 32), processors=16))


def _device() -> torch.device:
    return torch.device(device()) if device() == "cpu" else torch.device("cuda", 0)


def _split_and_not(case: Case) -> dict[str, float]:
    """Return errors of a call that every kernel splits.

    It must equal a call without splitting, and be reproducible.
    """
    from raymm.kernels.flash.gpu.device_tables import attention_plan

    whole = run(replace(case, processors=None))
    parts = run(case)
    for one, other in zip(whole, parts, strict=True):
        one, other = one.nan_to_num(neginf=0), other.nan_to_num(neginf=0)
        assert (one - other).norm() <= 1e-6 * one.norm()
    again = run(case)
    assert all(torch.equal(one, other) for one, other in zip(parts, again, strict=True))
    plan = _last_plan(attention_plan, case)
    tables = (plan.forward, plan.backward_query, plan.backward_key)
    assert all(one.slots > len(one.merges) > 0 for one in tables)
    return errors(case, found=again)


def _last_plan(attention_plan, case: Case):
    from raymm.kernels.flash.gpu import attention

    layout = attention._layout(
        torch.device(device()), *case.heads, case.head_dim * 4, case.processors
    )
    return attention_plan(case.masks, options(case)["launch"].config, layout, _device())


# The fewest blocks that every kernel still splits.
@pytest.mark.cells(1)
@pytest.mark.parametrize(
    ("pattern", "length", "blocks"),
    [
        ("causal", 800, (128, 128)), ("ee", 800, (128, 128)), ("prefix", 800, (128, 128)),
        ("shared_question", 1000, (128, 64)),
    ],
)
def test_split_equals_whole_and_is_deterministic(triton_worker, pattern, length, blocks):
    mask = every_pattern(length)[pattern]()
    case = Case((mask,), blocks=blocks, processors=64)
    found = triton_worker(_split_and_not, case)
    assert max(found.values()) <= BOUNDS[case.dtype], found
