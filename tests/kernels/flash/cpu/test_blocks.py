"""Plans of CPU attention: every visible pair once, bounded masks, a cache per mask."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu.every_mask import every_pattern
from raymm.kernels.flash.cpu.blocks import Kind, Limits, Plan, plan_blocks
from raymm.kernels.mask import patterns
from tests.kernels.flash.cpu.test_attention import NAMES
from tests.support.random_masks import tables

LIMITS = [
    Limits(),
    Limits(overhead=1),
    Limits(overhead=10**6),
    Limits(overhead=100, triangles=False, rows=16, keys=24),
]


def assert_covers(mask, limits):
    """Check that every visible pair is in exactly one part, and no other pair is."""
    plan, count = Plan(mask, limits), torch.zeros(mask.shape, dtype=torch.int32)
    for block in plan.blocks:
        for part in block.parts:
            rows, keys = (
                torch.cat([torch.arange(*run) for run in runs]) for runs in (block.rows, part.runs)
            )
            ones = torch.ones(len(rows), len(keys), dtype=torch.int32)
            if part.kind is Kind.CAUSAL:
                assert ones.shape[0] == ones.shape[1]
                ones = ones.tril()
            elif part.kind is Kind.MASKED:
                ones = plan.visible(block, part).int()
            count[rows[:, None], keys] += ones
            assert not limits.rows or len(rows) <= limits.rows
            assert not limits.keys or len(keys) <= limits.keys
    assert torch.equal(count, mask.dense().int())


@given(tables(), st.sampled_from(LIMITS))
def test_plans_cover_random_tables(mask, limits):
    assert_covers(mask, limits)


@pytest.mark.parametrize("name", NAMES)
def test_plans_cover_every_pattern(name):
    for limits in LIMITS:
        assert_covers(every_pattern(700)[name](), limits)


def test_no_part_masks_more_than_its_block():
    """Check the bound: a long window or triangle has no T x T mask."""
    length = 16384
    for mask in (patterns.causal(length), patterns.causal(length, 4096),
                 patterns.sinks_and_window(length)):  # fmt: skip
        for block in Plan(mask, Limits()).blocks:
            for part in block.parts:
                if part.kind is Kind.MASKED:
                    rows, keys = (
                        sum(stop - start for start, stop in runs)
                        for runs in (block.rows, part.runs)
                    )
                    assert rows * keys <= 512 * 1024


def test_plans_are_shared_and_go_with_their_mask():
    mask = patterns.causal(300, 40)
    assert plan_blocks(mask, Limits()) is plan_blocks(mask, Limits())
    plan = weakref.ref(plan_blocks(mask, Limits()))
    for overhead in range(20):
        plan_blocks(mask, Limits(overhead))
    gc.collect()
    assert plan() is None  # only a few plans are cached
    plan = weakref.ref(plan_blocks(mask, Limits()))
    del mask
    gc.collect()
    assert plan() is None
