"""Styles benchmark: plans between the styles are never slower, and run."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from benchmarks.devices.emulation import ENTRY
from benchmarks.shared.styled_plans import backend, styled
from benchmarks.styles import AUTO, BILLIONS, MODELS, searched
from raymm.actors.rank.rank_resources import RankResources
from raymm.runtime.parallel_model import ParallelModel
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.check_samples import check_samples
from raymm.scheduler.schedule.lower import full_program
from raymm.scheduler.schedule.step_graph import full_samples


@cache
def plans_of(model: str):
    return searched(model, None)


@pytest.mark.cells(1)
@pytest.mark.parametrize("model", [name for name in MODELS if name != "ofasys"])
def test_plans_between_the_styles_are_never_slower_and_run(model):
    starts, search = plans_of(model)
    assert all(search.best.seconds <= option.seconds for option in starts.values())
    plan = search.best.plan
    program = full_program(plan)
    check_program(program)
    if plan.splits_samples:
        check_samples(plan, program, full_samples(plan))
    assert [line.split(":")[0] for line in search.lines()] == [n.name for n in plan.graph.nodes]
    if model in BILLIONS:  # within memory
        assert max(memory.total for memory in search.best.memory) <= plan.memory_limit
    assert AUTO not in starts


def test_a_plan_between_the_styles_wins_where_neither_fits_well():
    """Plan a large language model and two encoders.

    One encoder alternates with the other's pipeline, and replicas of the language model's stages
    share samples.
    """
    starts, search = plans_of("valm_ms")
    assert list(starts) == ["pipelined"]  # the unsharded language model fits nowhere
    assert search.best.seconds < 0.95 * starts["pipelined"].seconds
    assert len(search.best.plan.replicas("llm")) > 1


def test_a_plan_between_the_styles_equals_one_process(ray_cluster):
    """Run stages that take no time, on six ranks: replicas that share samples, stages, guests."""
    _, search = plans_of("valm_ms")
    profile = search.best.plan.profile
    quick = replace(profile, modules={
        name: tuple(replace(c, forward=0.0, backward_input=0.0, backward_weight=0.0) for c in cost)
        for name, cost in profile.modules.items()
    })
    plan = replace(search.best.plan, profile=quick, memory_limit=None)
    dag, running_plan = styled(plan)
    batch = {ENTRY: torch.randn(16, 4)}
    with ParallelModel(
        dag, running_plan, quota_backend=lambda: backend(10), resources=RankResources(cpus=0.1)
    ) as running:
        found = running.train_step(batch)
        # Both encoders read the batch, and the language model adds them.
        assert found.loss == pytest.approx(float(2 * batch[ENTRY].mean()), abs=1e-6)
        spans = {span.stage.module for span in found.timeline.compute()}
        assert spans == set(dag.nodes)
        assert running.evaluate(batch).loss != pytest.approx(found.loss, abs=1e-6)
