"""Accepted transitions of a run's state, as a table, and the callers that follow it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.errors import (
    FailureKind,
    InternalError,
    Loss,
    RankFailedError,
    RunFailedError,
)
from raymm.recovery.failure_policy import Action, Cause, FailurePolicy
from raymm.recovery.run_controller import RunController, cause_of
from raymm.recovery.run_state import TRANSITIONS, RunState, checked


def test_every_state_can_be_reached_and_has_a_way_to_the_end() -> None:
    reached, ends = {RunState.INITIALIZING}, {RunState.FINISHED, RunState.FAILED}
    for _ in RunState:
        reached |= {after for before in reached for after in TRANSITIONS[before]}
    assert reached == set(RunState) == set(TRANSITIONS)
    for state in set(RunState) - ends:
        assert ends <= TRANSITIONS[state]
    assert not any(TRANSITIONS[end] for end in ends)


@pytest.mark.parametrize("before", RunState)
@pytest.mark.parametrize("after", RunState)
def test_transitions_outside_the_table_are_refused(before, after) -> None:
    if after is before or after in TRANSITIONS[before]:
        assert checked(before, after) is after
        return
    with pytest.raises(InternalError, match=f"from {before.value} to {after.value}"):
        checked(before, after)


@pytest.mark.parametrize(("error", "cause"), [
    (RankFailedError("rank 0 died"), Cause.FAILURE),
    (RankFailedError("rank 0 failed: KeyError: 'a'", FailureKind.USER), Cause.ERROR),
    (RankFailedError("rank 0 failed: MemoryError", FailureKind.USER), Cause.ERROR),
    (RankFailedError("rank 0 failed", FailureKind.RESOURCE), Cause.RESOURCES),
    (RankFailedError("rank 0 failed", FailureKind.CONNECTION), Cause.CONNECTION),
    (RankFailedError("rank 0 failed", FailureKind.DEFECT), Cause.ERROR),
    (RunFailedError("worker 0 failed", FailureKind.RESOURCE, Loss.DATA_WORKER), Cause.RESOURCES),
    (RunFailedError("worker 0 died", lost=Loss.DATA_WORKER), Cause.FAILURE),
    (RunFailedError("gone", lost=Loss.CLUSTER), Cause.CLUSTER),
    (RunFailedError("gone", lost=Loss.PREEMPTED_NODE), Cause.PREEMPTION),
])
def test_causes(error, cause) -> None:
    assert cause_of(error) is cause
    if cause is Cause.FAILURE:
        assert cause_of(error, announced=True) is Cause.PREEMPTION


def controller(clock=lambda: 0.0, step=lambda: 3, recoveries=2) -> RunController:
    return RunController(FailurePolicy(1, None, recoveries), step, clock)


def test_an_error_is_decided_on_once() -> None:
    run, error = controller(), RankFailedError("rank 0 (stages a, process 17 on b) died")
    assert run.decide_on(error, in_place=True).action is Action.RECOVER
    assert run.decide_on(error).action is Action.RECOVER and len(run.interruptions) == 1
    again = RankFailedError("rank 0 (stages a, process 18 on b) died")
    decision = run.decide_on(again, in_place=True)
    assert decision.action is Action.END_FOR_GOOD and "in step 3 before" in decision.why
    run.add_notes(again, decision.why)
    assert again.__notes__[0] == "Earlier interruption 1, in step 3: rank 0 (stages a) died"


def test_losses_in_a_recovery_do_not_blame_the_step() -> None:
    """Give the rank and the step another chance, unless it fails in the same way again."""
    died = [
        RankFailedError(f"rank 0 (stages a, process {pid} on b) died") for pid in range(10, 14)
    ]
    for recovering, end in (([False, True, False], "in step 3"),
                            ([False, True, True], "in the recovery of step 3")):
        run, decisions = controller(recoveries=None), []
        for error, within in zip(died, recovering, strict=False):
            decisions.append(run.decide_on(error, in_place=True, recovering=within))
        assert [decision.action for decision in decisions] == [
            Action.RECOVER, Action.RECOVER, Action.END_FOR_GOOD
        ]
        assert f"happened {end} before" in decisions[-1].why
    run.add_notes(died[2], "it would again")
    assert died[2].__notes__[1] == (
        "Earlier interruption 2, in the recovery of step 3: rank 0 (stages a) died"
    )


def test_recoveries_have_a_separate_hourly_budget() -> None:
    now = [0.0]
    steps = iter(range(100))
    run = controller(lambda: now[0], lambda: next(steps))
    recover = lambda: run.decide(Cause.FAILURE, "died", in_place=True)  # noqa: E731
    assert [recover().action for _ in range(2)] == [Action.RECOVER] * 2
    assert run.decide(Cause.FAILURE, "died").action is Action.GO_ON  # run.max_failures is separate
    end = recover()
    assert end.action is Action.END
    assert end.why == "recovery 3 exceeds run.max_recoveries, which is 2"
    now[0] = 3601.0
    assert recover().action is Action.RECOVER


@given(st.integers(0, 4), st.lists(st.floats(0, 5000), max_size=8))
def test_a_budget_has_recoveries_left_if_it_allows_one(most, times) -> None:
    now, steps = [0.0], iter(range(100))
    run = controller(lambda: now[0], lambda: next(steps), most)
    for now[0] in sorted(times):
        left = run.recoveries_left()
        decision = run.decide(Cause.FAILURE, "died", in_place=True)
        assert (decision.action is Action.RECOVER) == (left > 0)
        assert run.recoveries_left() == left - 1
    assert controller(recoveries=None).recoveries_left() == math.inf
