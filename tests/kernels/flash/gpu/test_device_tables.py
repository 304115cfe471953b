"""Device tables of a batch of masks, and the cache of plans."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.attention_case import Case
from raymm.kernels.mask import patterns
from raymm.kernels.mask.mask import AttentionMask, query_rows
from tests.support.interpreted_triton import run
from tests.support.random_masks import tables


def _plans_are_shared(case: Case) -> None:
    from raymm.kernels.flash.gpu.device_tables import CACHED_PLANS, attention_plan

    attention_plan.cache_clear()
    for _ in range(3):
        run(case)
    assert attention_plan.cache_info()[:2] == (2, 1)
    assert attention_plan.cache_info().maxsize == CACHED_PLANS


def test_plans_are_shared(triton_worker):
    triton_worker(_plans_are_shared, Case((patterns.causal(40),), blocks=(32, 32)))


def plan_of(*masks: AttentionMask):
    """Return the plan of a batch on the CPU, with small tiles."""
    pytest.importorskip("triton")
    from raymm.kernels.flash.gpu.device_tables import AttentionPlan, Layout
    from raymm.kernels.flash.gpu.launch_configs import AttentionConfig, KernelConfig

    kernel = KernelConfig(16, 32, 4, 1)
    config = AttentionConfig(kernel, kernel, kernel)
    return AttentionPlan(masks, config, Layout(4, 2, 64, 8), torch.device("cpu"))


@given(tables(), st.booleans())
def test_tables_on_the_device_describe_the_mask(mask, twice):
    """Rebuild the dense mask from bounds, attend and identity."""
    plan = plan_of(*[mask] * (1 + twice))
    rows, keys = mask.shape
    lo1, length1, lo2, length2 = plan.bounds[0, :, :rows].long().unsqueeze(-1)
    positions = torch.arange(keys)
    seen = (lo1 <= positions) & (positions < lo1 + length1)
    seen |= (lo2 <= positions) & (positions < lo2 + length2)
    if plan.needs_bits:
        seen &= (plan.attend[0, :rows, None] & plan.identity[0, None, :keys]) != 0
    assert torch.equal(seen, mask.dense())
    assert plan.bounds.shape[0] == 1 and plan.bounds.shape[-1] % 256 == 0
    assert not plan.bounds[..., rows:].any()


def test_passes_with_equal_tiles_share_tables():
    plan = plan_of(patterns.causal(100), patterns.causal(100, 9))
    assert plan.backward_query is plan.forward and plan.backward_key is not plan.forward
    assert plan.forward.items[:, 1].unique().tolist() == [0, 1]  # both sequences


def test_too_many_kinds_of_keys_are_rejected():
    kinds = 40
    rows = query_rows([0], hi=kinds, attend=(1 << (kinds - 1)) - 1)
    keys = [[n, 1 << n] for n in range(kinds)]
    with pytest.raises(ValueError, match="have 40 different key identities; a GPU supports at mo"):
        plan_of(AttentionMask(rows, keys, 3, kinds))
