"""The planners' evaluation matches the trainer's program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import NoPlanError
from raymm.scheduler.costs.devices import Link
from raymm.scheduler.plan.plan import Edge, Plan
from raymm.scheduler.schedule.lower import lower, refine
from raymm.scheduler.schedule.memory import rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.schedule.simulate import simulate
from raymm.scheduler.schedule.stage_costs import op_seconds
from raymm.scheduler.search import evaluation
from raymm.scheduler.search.evaluation import Candidates, evaluate, step_timeline
from tests.scheduler.schedule.test_lower import any_plans, chain

NETWORKS = st.sampled_from([Network(), Network(Link(0.5, 10.0), Link(3.0, 2.0), 2)])


def seconds_of(plan: Plan, network: Network) -> float:
    names = [node.name for node in plan.graph.nodes]
    program = lower(plan, [names] * plan.num_microbatches)
    return simulate(
        program, op_seconds(plan), transfers=network.transfers(plan), posted=plan.posted_receives
    ).makespan


@given(any_plans(), NETWORKS)
def test_seconds_are_those_of_the_program_that_runs(plan: Plan, network: Network) -> None:
    option, reason = evaluate(plan, network, "a name")
    assert reason is None and option.layout == "a name"
    assert option.seconds == seconds_of(option.plan, network)
    assert step_timeline(option.plan, network).makespan == option.seconds
    assert option.plan == replace(plan, policy=option.plan.policy)
    # A search orders plans by the same seconds.
    searched = Candidates(network, ("1f1b",)).seconds(plan)
    assert searched == pytest.approx(seconds_of(plan, network), rel=1e-6, abs=1e-6)


@given(any_plans(), st.floats(0.5, 1.5))
def test_a_plan_fits_if_every_rank_does(plan: Plan, share: float) -> None:
    needs = [need.total for need in rank_memory(plan, lower(plan, [
        [node.name for node in plan.graph.nodes]
    ] * plan.num_microbatches))]
    limit = int(share * max(needs)) or 1
    plan = replace(plan, memory_limit=limit)
    found = Candidates(Network(), ("1f1b",))
    assert found.fits(plan) == (max(needs) <= limit)
    assert found.fits(replace(plan, memory_limit=None))
    found.add("it", plan)
    assert len(found.options) + len(found.refused) == 1
    assert bool(found.options) == (evaluate(plan, Network())[1] is None)


@pytest.mark.parametrize("share", [0.2, 1.0, 5.0])
def test_no_policy_is_searched_far_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    plan = chain(3, 6, "zero_bubble")
    free, _ = evaluate(plan, Network())
    asked = []

    def noting(plan: Plan, delays: Mapping[Edge, float]) -> tuple[Plan, float]:
        asked.append(plan)
        return refine(plan, delays)

    monkeypatch.setattr(evaluation, "refine", noting)
    limit = int(share * max(need.total for need in free.memory))
    option, reason = evaluate(replace(plan, memory_limit=limit), Network())
    assert (reason is None) == (share >= 1) == bool(asked)
    if reason is None:
        assert (option.seconds, option.memory) == (free.seconds, free.memory)
    else:
        assert "memory_limit" in reason and option.plan.policy is None


def test_a_proposal_lists_the_fastest_first() -> None:
    plan = chain(3, 6, "1f1b")
    found = Candidates(Network(), ("gpipe", "1f1b", "zero_bubble"))
    with pytest.raises(NoPlanError, match="no plan fits: there is none for this model"):
        found.proposal()
    found.add("small", replace(plan, memory_limit=149))
    with pytest.raises(NoPlanError, match=r"no plan fits: small: .*rank 0 .*llm\.0"):
        found.proposal()
    found.add_schedules("chain", plan)
    proposal = found.proposal()
    assert [option.plan.schedule for option in proposal.options][0] == "zero_bubble"
    times = [option.seconds for option in proposal.options]
    assert times == sorted(times) and len(times) == 3
    assert proposal.bound <= proposal.best.seconds == times[0]
    assert [label for label, _ in proposal.refused] == [
        "small: projector 1, llm 3; 3 ranks, 1f1b"
    ]
