"""Stages that microbatches use, compared with a walk over the stage graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.schedule.step_graph import active_stages, full_samples, full_step
from tests.support.random_plans import alignment, chain, profiled_plans, steps


@given(steps(profiled_plans()))
def test_active_stages_equal_a_walk_over_the_graph(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    for microbatch, uses in enumerate(active_stages(plan, present)):
        def runs(module: str, given=present[microbatch]) -> bool:
            return module in plan.graph.losses or module in given or any(
                map(runs, plan.graph.producers(module))
            )

        running = {
            stage.id for stage in plan.stages
            if runs(stage.module) and plan.runs(stage, microbatch)
        }
        assert uses.stages == running

        def needs(stage, running=running) -> bool:
            return plan.trainable(plan.by_id[stage]) or any(
                needs(producer) for producer in plan.stage_producers[stage] if producer in running
            )

        assert uses.needs_backward == {stage for stage in running if needs(stage)}
        assert uses.needs_input_grad == {
            stage for stage in running
            if any(p in running and needs(p) for p in plan.stage_producers[stage])
        }


@given(steps())
def test_evaluation_needs_no_backward(step: tuple[Plan, list[set[str]]]) -> None:
    plan, present = step
    trained, evaluated = active_stages(plan, present), active_stages(plan, present, True)
    for one, other in zip(trained, evaluated, strict=True):
        assert one.stages == other.stages
        assert not other.needs_backward and not other.needs_input_grad


def test_microbatches_with_equal_modules_share_an_object():
    first, second, text = active_stages(alignment(3), [{"vision"}, {"vision"}, set()])
    assert first is second and {s.module for s in text.stages} == {"llm"}


def test_features_replace_the_first_stages_of_a_module():
    plan = alignment(1)
    (uses,) = active_stages(plan, [{"vision"}], featured=[{"vision"}])
    assert {(s.module, s.index) for s in uses.stages if s.module == "vision"} == {("vision", 1)}


def test_steps_with_every_modality():
    plan = chain(2, 3)
    assert full_step(plan) == [["llm"]] * 3 and full_samples(plan) == ()
    stages = tuple(
        replace(stage, replica=n, rank=2 * n + stage.index, split="samples")
        for stage in plan.stages for n in range(2)
    )
    split = replace(plan, stages=stages, shared_ranks=None)
    assert [samples.size for samples in full_samples(split)] == [2] * 3


def test_unknown_modules_and_missing_samples_are_rejected():
    with pytest.raises(ValueError, match=r"input for \['video'\]; modules are"):
        active_stages(alignment(1), [{"video"}])
