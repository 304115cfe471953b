"""Steps predicted from costs of modules on their microbatches."""

import numpy as np
import pytest

from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.minibatch.measured_costs import Column, group_units
from raymm.scheduler.minibatch.problem import SampleSizes
from raymm.scheduler.minibatch.step_forecast import StepForecast
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.program import Op
from raymm.scheduler.program.stage_samples import filled_samples
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.schedule.simulate import simulate

MODULES = {"vision": "vision", "text": "llm"}


@pytest.fixture
def plan():
    """Return an encoder, and two replicas of a two-stage language model.

    The second stage takes twice as long.
    """
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True, True))), (("vision", "llm"),)
    )
    stages = [Stage("vision", 0, (0, 1), 0)]
    for copy in range(2):
        stages += [Stage("llm", i, (i, i + 1), 1 + 2 * copy + i, replica=copy) for i in range(2)]
    return Plan(graph, tuple(stages), 4)


def real_step(plan, seconds, present):
    """Return the timeline if backwards take twice as long as forwards."""
    costs = {}
    for stage in plan.stages:
        share = {"vision": 1.0, "llm": (1 + stage.index) / 3}[stage.module]
        column = ["vision", "llm"].index(stage.module)
        for m in range(len(seconds)):
            costs[stage.id, Op.FORWARD, m] = seconds[m, column] * share / 3
            costs[stage.id, Op.BACKWARD, m] = seconds[m, column] * share * 2 / 3
    return simulate(lower(plan, present), {}, microbatch_costs=costs)


def test_a_repeated_step_is_predicted_exactly(plan):
    forecast = StepForecast(plan, MODULES, "text")
    assert forecast.replicas == {"vision": 1, "text": 2}
    rng = np.random.default_rng(0)
    for _ in range(3):
        seconds = rng.uniform(0.1, 1.0, (4, 2))
        real = real_step(plan, seconds, [["vision"]] * 4)
        np.testing.assert_allclose(forecast.observe(real, 4), seconds)
    later = rng.uniform(0.1, 1.0, (4, 2))
    later[1, 0] = 0.0  # text alone
    real = real_step(plan, later, [["vision"], [], ["vision"], ["vision"]])
    predicted = forecast.timeline(later)
    assert predicted.makespan == pytest.approx(real.makespan)
    assert [s[:4] for s in predicted.compute()] == [s[:4] for s in real.compute()]


def test_other_shares_are_learnt(plan):
    forecast = StepForecast(plan, MODULES, "text", half_life=1.0)
    seconds = np.tile([0.1, 0.6], (4, 1))
    forecast.observe(real_step(plan, seconds, [["vision"]] * 4), 4)
    even = {
        (stage.id, op): 0.05 if stage.module == "vision" else 0.15
        for stage in plan.stages for op in (Op.FORWARD, Op.BACKWARD)
    }
    now = simulate(lower(plan, [["vision"]] * 4), even)
    assert forecast.timeline(seconds).makespan != pytest.approx(now.makespan, rel=0.02)
    for _ in range(12):
        forecast.observe(now, 4)
    assert forecast.timeline(seconds).makespan == pytest.approx(now.makespan, rel=0.01)


def test_shared_microbatches_are_predicted_exactly():
    """Use an encoder on one rank, then two replicas that have half of each microbatch.

    Images are in the first half alone, in the second, or in none.
    """
    graph = ModuleGraph(
        (ModuleNode("vision", (True,)), ModuleNode("llm", (True,))), (("vision", "llm"),)
    )
    plan = Plan(graph, (
        Stage("vision", 0, (0, 1), 0, split="samples"),
        *(Stage("llm", 0, (0, 1), 1 + k, replica=k, split="samples") for k in range(2)),
    ), 3)  # fmt: skip
    forecast = StepForecast(plan, MODULES, "text")
    assert forecast.columns == (Column("vision"), Column("text", 0, 2), Column("text", 1, 2))
    sizes = SampleSizes(("vision", "text"), np.array([[1, 9], [0, 5], [0, 7], [2, 8]]))
    groups = [[0, 1, 2], [1, 2, 3], [1, 2]]
    offsets = [(0, 1, 1, 1), (0, 0, 0, 2)]
    samples = [filled_samples(plan, 3, {"vision": of}) for of in offsets]
    samples.append(filled_samples(plan, 2, {}))
    rng = np.random.default_rng(0)
    units, _ = group_units(sizes, groups, True, forecast.columns)
    for _ in range(2):
        seconds = np.where(units > 0, rng.uniform(0.1, 1.0, (3, 3)), 0.0)
        costs = {
            (stage.id, op, m): seconds[m, column] * part
            for column, stage in enumerate(plan.stages) for m in range(3)
            for op, part in ((Op.FORWARD, 0.25), (Op.BACKWARD, 0.75))
        }
        real = simulate(
            lower(plan, [["vision"], ["vision"], []], samples=samples), {}, microbatch_costs=costs
        )
        np.testing.assert_allclose(forecast.observe(real, 3), seconds)
    predicted = forecast.timeline(seconds, forecast.samples(sizes, groups))
    assert [s[:4] for s in predicted.compute()] == [s[:4] for s in real.compute()]
    assert predicted.makespan == pytest.approx(real.makespan)
