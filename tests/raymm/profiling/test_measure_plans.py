"""Plans that are measured to choose among them."""

from dataclasses import replace

import pytest

from raymm.errors import PlanError
from raymm.profiling.measure_plans import Measured, distinct_options
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.search.evaluation import Option
from raymm.scheduler.search.module_degrees import make_plan


def test_only_plans_that_run_differently_are_measured():
    cost = LayerCost(1.0, 1.0, 1.0)
    graph = ModuleGraph((ModuleNode("llm", (True, True)),), ())
    profile = CostProfile({"llm": (cost, cost)})
    plan = make_plan(graph, {"llm": ((0, 1), (1, 2))}, 4, "1f1b", profile)
    one = make_plan(graph, {"llm": ((0, 2),)}, 4, "1f1b", profile)
    options = [
        Option(name, p, 1.0, ())
        for name, p in (("a", plan), ("b", replace(plan, num_microbatches=4)), ("c", one),
                        ("d", replace(one, schedule="gpipe")))
    ]
    chosen = distinct_options(options, 4)
    assert [option.layout for option in chosen] == ["a", "c", "d"]
    assert [option.layout for option in distinct_options(options, 2)] == ["a", "c"]
    with pytest.raises(PlanError, match="measure is 0"):
        distinct_options(options, 0)
    assert Measured(chosen[0], 1.1, (1.0, 1.1, 1.2)).error == pytest.approx(0.1)
