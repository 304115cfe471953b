"""Choice of a step's program: every sample once, never slower than the given order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import PlanError
from raymm.scheduler.minibatch.step_choice import (
    Groups,
    OrderChooser,
    StepOrder,
    choose_step,
    given_groups,
    group_loads,
    hierarchical_groups,
    level_groups,
    planned_step,
    step_seconds,
)
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.memory import memory_of
from raymm.scheduler.schedule.planned_step import PlannedStep
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.schedule.step_graph import active_stages
from tests.support.field_schedules import FIELD, replicated_plan

SCHEDULES = ("1f1b", "zero_bubble", *FIELD)


@st.composite
def works(draw: st.DrawFn, least: int) -> dict[str, np.ndarray]:
    """Draw work of samples with long tails; some have no image."""
    count = draw(st.integers(least, 5 * least))
    draws = np.random.default_rng(draw(st.integers(0, 1000)))
    images = draws.lognormal(0.0, 1.0, count) * (draws.random(count) < 0.7)
    return {"vision": images / 2, "llm": draws.lognormal(0.0, 0.7, count) / 2 + images / 4}


def largest(work: dict[str, np.ndarray], groups: Groups, module: str) -> float:
    return float(group_loads(work, groups)[module].max())


def checked(groups: Groups, samples: int, microbatches: int) -> None:
    assert len(groups) == microbatches and all(groups)
    assert sorted(sample for group in groups for sample in group) == list(range(samples))


@given(st.data(), st.sampled_from(SCHEDULES))
def test_the_choice_is_complete_and_never_slower(data, schedule: str) -> None:
    plan = replicated_plan(data.draw(st.integers(2, 8)), schedule)
    work = data.draw(works(plan.num_microbatches))
    choice = choose_step(plan, work, ("1f1b", "dip"))
    checked(choice.groups, len(work["llm"]), plan.num_microbatches)
    in_order = given_groups(len(work["llm"]), plan.num_microbatches)
    for name in (schedule, "1f1b", "dip"):
        assert choice.seconds <= step_seconds(replace(plan, schedule=name), work, in_order)
    assert choice.fixed_seconds == step_seconds(plan, work, in_order)
    chosen = replace(plan, schedule=choice.schedule)
    step = planned_step(chosen, work, choice.groups)
    check_program(step.program)
    assert step.seconds() == choice.seconds
    assert choose_step(plan, work, ("1f1b", "dip")) == choice


@given(st.data())
def test_levelled_groups_have_every_sample_once(data) -> None:
    plan = replicated_plan(data.draw(st.integers(1, 8)), "1f1b")
    work = data.draw(works(plan.num_microbatches))
    for groups in (level_groups(work, plan), hierarchical_groups(work, plan)):
        checked(groups, len(work["llm"]), plan.num_microbatches)


def test_hierarchical_groups_level_the_encoder_first() -> None:
    """Draw images and text that are independent, so that both cannot be levelled in one pass."""
    draws = np.random.default_rng(3)
    work = {"vision": draws.lognormal(0.0, 0.5, 64) / 8, "llm": draws.lognormal(0.0, 0.5, 64) / 8}
    plan = replicated_plan(8, "1f1b")
    level, nested = level_groups(work, plan), hierarchical_groups(work, plan)
    in_order = given_groups(64, 8)
    for module in work:
        mean = work[module].sum() / 8
        assert largest(work, level, module) < 1.1 * mean < largest(work, in_order, module)
    mean = work["vision"].sum() / 8
    assert largest(work, nested, "vision") <= largest(work, level, "vision") + 0.02 * mean


def limited(plan: Plan, share: float) -> Plan:
    peaks = planned_step(plan, {"llm": np.ones(plan.num_microbatches),
                                "vision": np.ones(plan.num_microbatches)},
                         given_groups(plan.num_microbatches, plan.num_microbatches)).peaks()
    return replace(plan, activation_limits=tuple(int(peak * share) for peak in peaks))


def test_the_choice_keeps_the_limits_of_activations() -> None:
    plan = limited(replicated_plan(8, "entrain"), 1.5)
    draws = np.random.default_rng(1)
    work = {"vision": draws.lognormal(0.0, 0.5, 32) / 4, "llm": draws.lognormal(0.0, 0.5, 32) / 4}
    choice = choose_step(plan, work, ("dip",))
    step = planned_step(replace(plan, schedule=choice.schedule), work, choice.groups)
    limits = plan.activation_limits
    assert limits is not None
    assert all(peak <= limit for peak, limit in zip(step.peaks(), limits, strict=True))


def test_work_that_does_not_fit_the_plan_is_refused() -> None:
    plan = replicated_plan(4, "1f1b")
    with pytest.raises(PlanError, match=r"work has \[3\] samples; accepted: .* at least the 4"):
        choose_step(plan, {"llm": np.ones(3)})
    with pytest.raises(PlanError, match=r"work names \['audio'\]; modules are"):
        choose_step(plan, {"audio": np.ones(4), "llm": np.ones(4)})


@given(st.data(), st.sampled_from(("1f1b", "gpipe", "zero_bubble")))
def test_ending_slow_simulations_early_changes_no_choice(data, schedule: str) -> None:
    plan = replicated_plan(data.draw(st.integers(2, 8)), schedule)
    work = data.draw(works(plan.num_microbatches))
    choices = [choose_step(plan, work, ("1f1b",))]
    with pytest.MonkeyPatch.context() as patch:
        complete = PlannedStep.with_loads
        patch.setattr(
            PlannedStep, "with_loads", lambda step, name, loads, until: complete(step, name, loads)
        )
        choices.append(choose_step(plan, work, ("1f1b",)))
    assert choices[0] == choices[1]


def simulated(plan: Plan, schedule: str, loads: dict[str, np.ndarray]) -> float:
    """Return the seconds of the program that ranks run, with loads of its microbatches."""
    plan = replace(plan, schedule=schedule)
    numbers = range(len(loads["llm"]))
    program = lower(plan, [[name for name in loads if loads[name][m] > 0] for m in numbers])
    check_program(program)
    costs = {
        (stage, op, m): seconds * float(loads[stage.module][m])
        for (stage, op), seconds in op_seconds(plan).items() for m in numbers
    }
    return simulate(program, {}, microbatch_costs=costs, posted=plan.posted_receives).makespan


@given(st.data(), st.sampled_from(("1f1b", "gpipe", "zero_bubble")), st.booleans())
def test_a_chosen_order_is_that_of_the_program_and_never_slower(
    data, schedule: str, replicas: bool
) -> None:
    plan = replicated_plan(data.draw(st.integers(2, 8)), schedule) if replicas else chain_plan(
        data.draw(st.integers(2, 8)), schedule
    )
    chooser = OrderChooser(plan, ("1f1b", "zero_bubble"))
    draws = np.random.default_rng(data.draw(st.integers(0, 100)))
    for _ in range(2):
        many = plan.num_microbatches
        loads = {
            "vision": draws.lognormal(0.0, 1.0, many) * (draws.random(many) < 0.7),
            "llm": draws.lognormal(0.0, 0.7, many),
        }
        chosen = chooser.choose(loads)
        assert sorted(chosen.order) == list(range(many))
        ordered = {name: load[list(chosen.order)] for name, load in loads.items()}
        assert chosen.fixed_seconds == pytest.approx(simulated(plan, schedule, loads))
        assert chosen.seconds == pytest.approx(simulated(plan, chosen.schedule, ordered))
        assert chosen.seconds <= chosen.fixed_seconds
        assert OrderChooser(plan, ("1f1b", "zero_bubble")).choose(loads) == chosen
        for name in ("1f1b", "gpipe", "zero_bubble"):
            other = draws.permutation(many)
            seconds = simulated(plan, name, {key: load[other] for key, load in loads.items()})
            assert chosen.bound <= seconds * (1 + 1e-9)


def chain_plan(microbatches: int, schedule: str) -> Plan:
    """Return an encoder and a language model on three separate ranks."""
    plan = replicated_plan(microbatches, schedule)
    stages = (Stage("vision", 0, (0, 1), 0), Stage("llm", 0, (0, 1), 1), Stage("llm", 1, (1, 4), 2))
    return replace(plan, stages=stages, shared_ranks=None)


def bytes_of(plan: Plan, loads: dict[str, np.ndarray], order: StepOrder | None = None) -> int:
    """Return the bytes that the fullest rank needs in a step, in its given or a chosen order."""
    if order is not None:
        plan = replace(plan, schedule=order.schedule)
        loads = {name: load[list(order.order)] for name, load in loads.items()}
    step = PlannedStep(plan, active_stages(plan, [list(loads)] * len(loads["llm"])))
    peaks = step.activation_peaks(step.reloaded(loads))
    return max(need.total for need in memory_of(plan, peaks))


@given(st.integers(0, 1000))
def test_a_chosen_order_needs_no_more_memory(seed: int) -> None:
    plan = chain_plan(8, "1f1b")
    draws = np.random.default_rng(seed)
    loads = {"vision": draws.lognormal(0.0, 1.0, 8), "llm": draws.lognormal(0.0, 1.0, 8)}
    most = max(bytes_of(plan, loads), bytes_of(plan, {name: np.ones(8) for name in loads}))
    assert bytes_of(plan, loads, OrderChooser(plan, ("gpipe",)).choose(loads)) <= most
    limit = bytes_of(plan, loads)
    chosen = OrderChooser(replace(plan, memory_limit=limit), ("gpipe",)).choose(loads)
    assert bytes_of(plan, loads, chosen) <= limit


@pytest.mark.parametrize(("change", "why"), [
    ({"profile": None}, "it has no profile; accepted: plans that raymm makes"),
    ({"stages": (
        Stage("vision", 0, (0, 1), 0, microbatch_factor=2), Stage("llm", 0, (0, 4), 1)
    )}, "its encoders join microbatches; accepted: microbatch_factor 1"),
    ({"stages": (
        Stage("vision", 0, (0, 1), 0, quota=0.5), Stage("llm", 0, (0, 4), 0, quota=0.5)
    )}, "it has slots or quotas; accepted: pipelined plans"),
])
def test_plans_without_seconds_of_single_microbatches_are_refused(change, why: str) -> None:
    plan = replace(chain_plan(4, "1f1b"), shared_ranks=None, **change)
    with pytest.raises(PlanError, match=f"the plan cannot be chosen per batch: {why}"):
        OrderChooser(plan)
