"""Decisions after interruptions, as a table."""

import pytest

from raymm.recovery.failure_policy import Action, Cause, FailurePolicy, Interruption

SHORT, CUT = Cause.RESOURCES, Cause.CONNECTION
GO_ON, END, FOR_GOOD = Action.GO_ON, Action.END, Action.END_FOR_GOOD


def lost(step, text="rank 0 died"):
    return Interruption(Cause.FAILURE, step, text)


def left(step, text="node a ends"):
    return Interruption(Cause.PREEMPTION, step, text)


def other(cause, step=1):
    return Interruption(cause, step, "something")


@pytest.mark.parametrize(("budgets", "interruptions", "actions", "why"), [
    ((1, 0), [lost(3), lost(5)], [GO_ON, END], "failure 2 exceeds run.max_failures, which is 1"),
    ((0, None), [lost(3)], [END], "failure 1 exceeds run.max_failures, which is 0"),
    ((None, 0), [lost(n) for n in range(9)], [GO_ON] * 9, "failure 9 (run.max_failures)"),
    ((9, 9), [lost(3), lost(3)], [GO_ON, FOR_GOOD], "in step 3 before"),
    ((9, 9), [lost(None), lost(None)], [GO_ON, FOR_GOOD], "before the first step before"),
    ((9, 9), [lost(3), lost(4), lost(3)], [GO_ON, GO_ON, FOR_GOOD], "would recur"),
    ((9, 9), [lost(3), lost(3, "rank 1 died")], [GO_ON, GO_ON], "failure 2 of at most 9"),
    ((9, 9), [left(3), left(3)], [GO_ON, GO_ON], "preemption 2 of at most 9"),
    ((0, 1), [left(3), left(3)], [GO_ON, END], "preemption 2 exceeds run.max_preemptions"),
    ((1, 1), [left(3), lost(3), left(4)], [GO_ON, GO_ON, END], "preemption 2"),
    ((None, None), [other(Cause.ERROR)], [FOR_GOOD], "same error again"),
    ((None, None), [lost(3), other(Cause.CLUSTER)], [GO_ON, END], "the cluster is gone"),
    ((0, 0), [other(Cause.RESIZE)] * 3, [GO_ON] * 3, "the cluster has changed"),
    ((9, 9), [other(SHORT)] * 4, [GO_ON] * 3 + [END], "retries after 1, 5, 25 s did not help in"),
    ((9, 9), [other(CUT), other(SHORT)] * 2, [GO_ON] * 3 + [END], "did not help in step 1"),
    ((9, 9), [other(CUT)] * 3 + [other(CUT, 2)], [GO_ON] * 4, "failure 4 of at most 9"),
    ((2, 0), [lost(1), other(SHORT, 2), other(CUT, 3)], [GO_ON, GO_ON, END], "failure 3 exceeds"),
    ((0, 0), [other(SHORT)], [END], "failure 1 exceeds run.max_failures, which is 0"),
])  # fmt: skip
def test_decisions(budgets, interruptions, actions, why):
    policy = FailurePolicy(*budgets)
    decisions = [policy.decide(interruptions[: n + 1]) for n in range(len(interruptions))]
    assert [one.action for one in decisions] == actions
    assert why in decisions[-1].why


@pytest.mark.parametrize("in_place", [False, True])
def test_retries_back_off_until_a_step_finishes(in_place):
    policy = FailurePolicy(9, 0, 9)
    short = [Interruption(SHORT, step, "no memory", 0.0, in_place) for step in (4, 4, 4, 5, 4)]
    decisions = [policy.decide(short[: n + 1]) for n in range(len(short))]
    assert [decision.wait_s for decision in decisions] == [1, 5, 25, 1, 0]
    assert decisions[0].action is (Action.RECOVER if in_place else GO_ON)
    assert "after a wait of 5 s" in decisions[1].why and decisions[-1].action is END
