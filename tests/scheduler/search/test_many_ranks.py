"""On many ranks plans are evaluated by their equal parts, nearly as well as brute force.

All reported figures are those of the whole plan.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.costs.layer_costs import CostProfile, LayerCost
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search import degree_search
from raymm.scheduler.search.degree_search import estimates
from raymm.scheduler.search.evaluation import Candidates, evaluate
from raymm.scheduler.search.module_degrees import DegreeChoices, ModuleDegrees
from raymm.scheduler.search.options import PlanProblem
from raymm.scheduler.search.planner import MANY_RANKS, propose
from raymm.scheduler.search.stage_search import joint_search
from raymm.scheduler.search.stage_space import StageSpace
from tests.support.random_models import models

NETWORK = Network(Link(1e-3, 1e3), Link(1e-2, 1e2), 4)
TP, DP = (1, 2), (1, 2, 4, 8)
BLOCK = LayerCost(1.0, 1.0, 1.0, 4000, 1000, 8, 100, 4)
CHOICES = DegreeChoices(TP, (1,), DP)


def everything(graph, profile, ranks, microbatches):
    """Return the seconds of the best plan of all assignments, each searched completely."""
    candidates = Candidates(NETWORK, ("1f1b",))
    all_degrees = [
        ModuleDegrees(dp, 1, tp) for dp, tp in itertools.product(DP, TP) if microbatches % dp == 0
    ]
    best = float("inf")
    for chosen in itertools.product(all_degrees, repeat=len(graph.nodes)):
        degrees = {node.name: one for node, one in zip(graph.nodes, chosen, strict=True)}
        try:
            space = StageSpace(graph, profile, ranks, microbatches, degrees=degrees)
            seconds = joint_search(
                space, candidates.seconds, candidates.bound, alternatives=0, incumbent=best
            ).best.seconds
        except NoPlanError:
            continue
        best = min(best, seconds)
    return best


@settings(max_examples=12, deadline=None)
@given(
    models(most_encoders=1, llm_layers=4), st.integers(MANY_RANKS + 1, 48), st.sampled_from([8, 16])
)
def test_within_a_hundredth_of_trying_everything(model, ranks, microbatches):
    graph, profile = model
    profile = replace(profile, links=NETWORK.links)
    proposal = propose(PlanProblem(
        graph, profile, ranks, microbatches, network=NETWORK, layouts=("modality_parallel",),
        chunks=(), schedules=("1f1b",), degrees={node.name: CHOICES for node in graph.nodes},
    ))
    assert proposal.best.seconds <= everything(graph, profile, ranks, microbatches) * 1.01
    for option in proposal.options:
        assert not isinstance(option.plan, EqualPart)
        assert option.plan.num_microbatches == microbatches
        assert option.plan.num_processes <= ranks
        again, reason = evaluate(option.plan, NETWORK, option.layout)
        assert reason is None and again.seconds == pytest.approx(option.seconds, rel=1e-12)
        assert again.memory == option.memory


@settings(max_examples=20, deadline=None)
@given(models(most_encoders=2, llm_layers=3), st.integers(8, 24))
def test_the_most_promising_assignments_are_estimated(model, ranks):
    """Estimate the assignments with the least path and share of the work, if there are too many."""
    graph, profile = model
    space = StageSpace(graph, replace(profile, links=NETWORK.links), ranks, 8)
    choices = {node.name: CHOICES for node in graph.nodes}
    every = estimates(space, choices, 4, "none")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(degree_search, "MOST_ESTIMATED", 8)
        some = estimates(space, choices, 4, "none")
    assert len(every) - 1 <= len(some) or 7 <= len(some) <= 8
    by_degrees = {tuple(e.degrees.items()): e for e in every}
    assert all(by_degrees[tuple(e.degrees.items())] == e for e in some)


def test_ten_thousand_ranks_have_a_plan():
    """Use degrees up to 1,024 replicas: more assignments than are estimated."""
    graph = ModuleGraph((ModuleNode("vision", (True,) * 8), ModuleNode("llm", (True,) * 16)),
                        (("vision", "llm"),))
    profile = CostProfile({"vision": (BLOCK,) * 8, "llm": (BLOCK,) * 16})
    powers = tuple(1 << n for n in range(11))
    choices = {name: DegreeChoices(powers[:4], powers[:3], powers) for name in ("vision", "llm")}
    problem = PlanProblem(
        graph, profile, 10_240, 1024, memory_limit=60_000, degrees=choices,
        network=Network(Link(1e-5, 1e7), Link(1e-4, 1e6), 8), schedules=("1f1b",),
    )
    best = propose(problem).best
    assert best.plan.num_processes <= 10_240 and best.plan.num_microbatches == 1024
    work = 1024 * 24 * 3.0 / 10_240
    assert work <= best.seconds <= 4 * work
