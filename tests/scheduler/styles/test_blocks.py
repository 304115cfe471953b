"""Layouts of blocks: every module once, within the devices, and plans that hold them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.scheduler.styles.blocks import (
    Block,
    Guest,
    Layout,
    StyleProblem,
    halved_counts,
    layouts,
    quota_choices,
)
from tests.scheduler.styles.test_style_search import style_problems


@given(style_problems())
def test_layouts_have_every_module_once_and_become_plans(problem: StyleProblem) -> None:
    names = {node.name for node in problem.graph.nodes}
    found = list(layouts(problem))
    assert len(set(found)) == len(found)
    for layout in found:
        modules = [name for block in layout.blocks for name in block.modules]
        assert sorted(modules) == sorted(names) and layout.devices <= problem.ranks
        plan = problem.plan(layout, "1f1b")
        assert plan.num_ranks == layout.devices
        assert plan.num_microbatches == layout.microbatches
        for block in layout.blocks:
            for name in block.modules:
                assert len(plan.replicas(name)) == block.copies
                assert len(plan.replicas(name)[0]) == block.stages
            assert sum(block.quotas) <= problem.steps
    # One device each is a layout whenever there are enough devices.
    if problem.ranks >= len(names):
        for count in problem.profiles:
            alone = {Block((name,)) for name in names}
            assert any(set(one.blocks) == alone for one in found if one.microbatches == count)


@given(style_problems(), st.integers(2, 6))
def test_quotas_fill_the_device(problem: StyleProblem, steps: int) -> None:
    names = tuple(node.name for node in problem.graph.nodes)
    (count, *_) = problem.profiles
    chosen = quota_choices(problem, count, names, 1)
    assert chosen[0] == ()
    if len(names) < 2 or len(names) > problem.steps:
        assert chosen == [()]
        return
    expected = [
        quotas for quotas in itertools.product(range(1, problem.steps + 1), repeat=len(names))
        if sum(quotas) == problem.steps
    ]
    assert chosen[1:] == expected


@pytest.mark.parametrize(("count", "halves"), [(1, [1]), (6, [6, 3]), (48, [48, 24, 12, 6])])
def test_halved_counts_are_whole_numbers(count, halves):
    assert halved_counts(count) == halves


@given(style_problems())
def test_guests_fit_on_the_pipeline_and_take_time(problem: StyleProblem) -> None:
    names = [node.name for node in problem.graph.nodes]
    if len(names) != 2 or problem.ranks < 2 or problem.graph.node(names[1]).num_layers < 2:
        return
    (count, *_) = problem.profiles
    block = Block((names[1],), stages=2, guests=(Guest(names[0], 1, 1),))
    assert problem.guest_seconds(count, block) == [0.0, problem.alone(count, names[0], 1)]
    assert problem.allowed(Layout((block,), count))
    outside = block._replace(guests=(Guest(names[0], 2, 1),))
    assert not problem.allowed(Layout((outside,), count))
    plan = problem.plan(Layout((block,), count), "1f1b")
    assert [s.rank for s in plan.module_stages(names[0])] == [1]
