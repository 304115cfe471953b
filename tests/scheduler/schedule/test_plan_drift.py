"""Measured steps compared with the profile of their plan."""

from dataclasses import replace

import pytest

from raymm.errors import PlanError
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.costs.profile_table import ProfileTable
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.plan.stage import StageId
from raymm.scheduler.schedule.lower import full_program, lower
from raymm.scheduler.schedule.plan_drift import PlanDrift
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import propose

GRAPH = ModuleGraph(
    (ModuleNode("vision", (True,) * 2), ModuleNode("llm", (True,) * 4)), (("vision", "llm"),)
)
PROFILE = CostProfile(
    {"vision": (LayerCost(1.0, 1.0, 1.0, 5),) * 2, "llm": (LayerCost(1.0, 1.0, 1.0, 7),) * 4},
    tokens={"vision": 50, "llm": 200},
)


def plan_of(profile=PROFILE):
    """Return the encoder on rank 0, and two replicas of the two-stage language model."""
    stages = [Stage("vision", 0, (0, 2), 0)]
    for copy in range(2):
        stages += [
            Stage("llm", i, (2 * i, 2 * i + 2), 1 + 2 * copy + i, replica=copy) for i in range(2)
        ]
    return Plan(GRAPH, tuple(stages), 4, profile=profile)


def measured(plan, slower, present=None):
    """Return a step in which stages of a module and index take multiples of their times."""
    costs = {
        (stage, op): seconds * slower.get((stage.module, stage.index), 1.0)
        for (stage, op), seconds in op_seconds(plan).items()
    }
    program = full_program(plan) if present is None else lower(plan, present)
    return simulate(program, costs)


def test_as_planned_is_no_drift():
    """Check steps without images, too, and steps that are ten times slower in every part."""
    plan = plan_of()
    drift = PlanDrift(plan)
    for present in (None, [["vision"], [], [], ["vision"]], [[]] * 4):
        timeline = measured(plan, {("vision", 0): 10, ("llm", 0): 10, ("llm", 1): 10}, present)
        found = drift.observe(timeline)
        assert found.excess == pytest.approx(0, abs=1e-9)
    assert drift.observe(measured(plan, {})).measured == pytest.approx(found.expected, rel=0.05)


def test_the_busiest_rank_and_its_share_by_hand():
    """Use four microbatches.

    The encoder takes 4 x 5 s (its input needs no gradient), four stages of the language model 2 x 6
    s each; the last ones take three times as long.
    """
    plan = plan_of()
    found = PlanDrift(plan).observe(measured(plan, {("llm", 1): 3.0}))
    assert (found.rank, found.stage) in ((2, StageId("llm", 1)), (4, StageId("llm", 1, 1)))
    assert found.measured == pytest.approx(36 / 116) and found.expected == pytest.approx(12 / 68)
    assert found.excess == pytest.approx(3 * 68 / 116 - 1)


def test_older_steps_are_forgotten():
    plan = plan_of()
    drift = PlanDrift(plan)
    for _ in range(50):
        drift.observe(measured(plan, {("llm", 1): 3.0}))
    for _ in range(60):
        found = drift.observe(measured(plan, {}))
    assert found.rank == 0 and found.excess < 0.05


def test_the_scaled_profile_predicts_the_measurements():
    plan = plan_of()
    slower = {("vision", 0): 0.5, ("llm", 1): 3.0}
    drift = PlanDrift(plan)
    drift.observe(measured(plan, slower))
    table = ProfileTable.from_json(drift.profile({"llm": 4}, "2026-11-22").to_json())
    assert (table.date, table.modules["llm"][0].samples) == ("2026-11-22", 4)
    again = table.at()
    assert [layer.activation_bytes for layer in again.modules["llm"]] == [7] * 4
    timeline = simulate(full_program(plan), op_seconds(plan, again))
    assert timeline.makespan == pytest.approx(measured(plan, slower).makespan)
    found = PlanDrift(replace(plan, profile=again)).observe(measured(plan, slower))
    assert found.excess == pytest.approx(0, abs=1e-9)


def test_planning_with_it_moves_layers_away_from_slow_ones():
    chain = ModuleGraph((ModuleNode("llm", (True,) * 6),), ())
    profile = CostProfile({"llm": (LayerCost(1.0, 1.0, 1.0),) * 6}, tokens={"llm": 100})

    def cut(of):
        found = propose(PlanProblem(chain, of, 2, 4, schedules=("1f1b",), chunks=()))
        return found.best.plan.module_stages("llm")[0].layers[1]

    assert cut(profile) == 3
    plan = Plan(
        chain, (Stage("llm", 0, (0, 3), 0), Stage("llm", 1, (3, 6), 1)), 4, profile=profile
    )
    drift = PlanDrift(plan)
    drift.observe(measured(plan, {("llm", 1): 3.0}))
    assert cut(drift.profile({}).at()) == 4


def test_a_stage_that_never_ran_is_scaled_like_all():
    plan = plan_of()
    drift = PlanDrift(plan)
    drift.observe(measured(plan, {("llm", 0): 2.0, ("llm", 1): 2.0}, [[]] * 4))
    assert drift.profile({}).at().modules["vision"][0].forward == pytest.approx(2.0)


def test_steps_that_cannot_be_compared():
    with pytest.raises(PlanError, match="no profile"):
        PlanDrift(plan_of(None))
    nothing = {name: (LayerCost(0, 0, 0),) * len(c) for name, c in PROFILE.modules.items()}
    plan = plan_of(CostProfile(nothing))
    drift = PlanDrift(plan)
    assert drift.observe(measured(plan_of(), {})) is None
    with pytest.raises(PlanError, match=r"has no tokens of \['llm', 'vision'\]"):
        drift.profile({})
