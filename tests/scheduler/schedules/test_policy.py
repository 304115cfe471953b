"""Policies: accepted values, candidates, and a complete step with any of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shared.tight_plans import tight_plans
from raymm.errors import PlanError
from raymm.scheduler.plan.equal_part import EqualPart
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import COMPUTE, FORWARDS
from raymm.scheduler.schedule.lower import iteration_time, lower, refine
from raymm.scheduler.schedules.policy import ANY_DISTANCE, ONE_F_ONE_B, Policy, policies
from tests.scheduler.schedule.test_bounds import chain
from tests.support.random_plans import contents, profiled_plans

a_policy = st.builds(
    Policy,
    st.tuples(*[st.integers(-1, 3)] * 4),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.sampled_from([1, 2, ANY_DISTANCE]),
    st.booleans(),
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": (0, 1, 2)}, r"priority is \(0, 1, 2\); it needs a whole number for each"),
        ({"priority": (0, 1, 2, 0.5)}, "priority is .*whole number"),
        ({"priority": (0, 1, 2, True)}, "priority is .*whole number"),
        ({"patience": 1.5}, "patience is 1.5; it must be between 0 and 1"),
        ({"patience": -0.1}, "patience is -0.1"),
        ({"patience": float("nan")}, "patience is nan"),
        ({"hops": 0}, "hops is 0; it must be a whole number, at least 1"),
        ({"hops": 1.0}, "hops is 1.0"),
        ({"beyond_depth": 1}, "beyond_depth is 1; it must be true or false"),
        ({"ahead": ((1, 0),)}, r"ahead is \(\(1, 0\),\); it must be whole numbers, at least 1"),
    ],
)
def test_impossible_policies_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**{"priority": (0, 1, 2, 3), **options})


def test_each_policy_is_tried_once() -> None:
    one, several = list(policies(False)), list(policies(True))
    assert len(set(one)) == len(one) and len(set(several)) == len(several)
    # The distance of a gradient matters only if a rank has several stages.
    assert {policy.hops for policy in one} == {ANY_DISTANCE}
    assert len({policy.hops for policy in several}) > 1
    again = list(policies(False, recompute=True))
    assert len(set(again)) == len(again) and set(one) < set(again)
    for tried in (one, several):
        assert {policy.beyond_depth for policy in tried} == {False, True}
        assert ONE_F_ONE_B not in tried  # 1F1B is always a candidate


@given(st.data())
def test_any_policy_runs_everything_once(data: st.DataObject) -> None:
    plan = replace(data.draw(profiled_plans()), schedule="zero_bubble")
    present = data.draw(contents(plan))
    chosen = replace(plan, policy=data.draw(a_policy))
    program = lower(chosen, present)
    check_program(program)
    forwards = [
        {(i.stage, i.microbatch) for rank in p for i in rank if i.op in FORWARDS}
        for p in (program, lower(replace(plan, schedule="1f1b"), present))
    ]
    assert forwards[0] == forwards[1]
    counts = Counter(i for rank in program for i in rank if i.op in COMPUTE)
    assert set(counts.values()) <= {1}
    one = iteration_time(replace(plan, schedule="1f1b"))
    assert iteration_time(chosen) <= one + 1e-6  # 1F1B itself is a candidate


@settings(max_examples=5, deadline=None)
@given(profiled_plans())
def test_a_settled_plan_has_its_policy(plan: Plan) -> None:
    plan = replace(plan, schedule="zero_bubble")
    settled, seconds = refine(plan)
    assert iteration_time(plan) >= seconds == iteration_time(settled)
    assert Plan.from_json(settled.to_json()) == settled
    assert refine(settled) == (settled, seconds)


def test_the_run_ahead_of_stages_is_searched() -> None:
    """Check that without it no tried policy is within 9% of the lower bound."""
    plan = list(tight_plans(45))[44]
    settled, seconds = refine(plan)
    assert settled.policy is not None and settled.policy.ahead
    assert seconds < 0.98 * iteration_time(plan)
    assert refine(plan) == (settled, seconds)
    assert Plan.from_json(settled.to_json()) == settled


def test_a_policy_found_on_a_part_fits_all_replicas() -> None:
    plan = list(tight_plans(45))[44]
    settled, seconds = refine(plan)
    whole = EqualPart.of(replace(settled, activation_limits=None), 3).whole()
    assert whole.policy == settled.policy and len(whole.replicas("llm")) == 3
    part = replace(settled, activation_limits=None)
    assert iteration_time(whole) == pytest.approx(iteration_time(part))
    again, _ = refine(replace(whole, policy=None))  # replicas hold as much as the first
    assert Plan.from_json(again.to_json()) == again
    assert seconds > 0


def test_an_invalid_policy_is_named() -> None:
    data = replace(chain(2, 2), policy=Policy((0, 1, 2, 3))).to_dict()
    for change, message in (
        ({"patience": 2}, "policy: patience is 2"),
        ({"priority": [0, 1]}, r"policy: priority is \(0, 1\)"),
        ({"speed": 1}, r"policy: unknown keys \['speed'\]"),
        ({"ahead": [[0, 1]]}, "policy: ahead is"),
        ({"ahead": [[2]]}, r"policy.ahead is \(\(2,\),\); it must have numbers for 2 of llm"),
    ):
        with pytest.raises(PlanError, match=message):
            Plan.from_dict({**data, "policy": {**data["policy"], **change}})
