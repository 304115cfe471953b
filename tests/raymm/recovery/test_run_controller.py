"""Run whose processes are lost continues in the remaining ones, bit for bit."""


import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raymm.cli.main import EXIT_RUN_FAILED
from raymm.errors import (
    FailureKind,
    InternalError,
    Loss,
    RankFailedError,
    RunFailedError,
)
from raymm.monitor.metrics import read_metrics
from raymm.recovery import failure_policy
from raymm.recovery.failure_policy import Action, Cause, FailurePolicy
from raymm.recovery.run_controller import TRANSITIONS, RunController, RunState, cause_of, checked
from tests.support.killing_callbacks import make_faults_again
from tests.support.tiny_run import STEPS, curve, heldout_rows
from tests.support.watching_callbacks import CALLS


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


KILL = "tests.support.killing_callbacks:KillRanks"
KILL_WORKER = "tests.support.killing_callbacks:KillDataWorker"


@pytest.fixture
def calls():
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def test_in_place_recovery_does_not_change_any_loss(
    finished, make_config, raymm, tmp_path, calls, inputs
):
    """Kill ranks, one of them before the first checkpoint, and a data worker."""
    step, rank = random.randrange(7, STEPS - 2), random.randrange(2)
    run = tmp_path / "killed"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 1,
        "run.log_samples": True, "data.heldout": str(inputs / "heldout.jsonl"),
        "run.eval_every": STEPS, "run.callbacks": [
            {KILL: {"after": [1, step], "rank": rank}},
            {KILL_WORKER: {"after": [4]}}, "tests.support.watching_callbacks:Recorder",
        ],
    }))
    assert code == 0, text
    assert text.count("recovering in place") == 3, text
    assert curve(run) == curve(finished.path), (step, rank)
    assert heldout_rows(run) == heldout_rows(finished.path)
    rows = read_metrics(run / "samples.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    restarts = [value for kind, value in calls if kind == "restart"]
    assert [restart.cause for restart in restarts] == ["failure"] * len(restarts)
    assert [kind for kind, _ in calls if kind in ("start", "end")] == ["start", "end"]


def test_a_lasting_shortage_ends_the_run_after_retries(
    make_config, raymm, ray_cluster, monkeypatch
):
    """Check that the run retries, as the resource may become available."""
    monkeypatch.setattr(failure_policy, "RETRY_WAITS_S", (0.0, 0.1, 0.2))
    code, text = raymm("train", make_config({
        "model.encoders.vision.preprocess":
            "tests.support.killing_callbacks:has_no_memory_in_ranks",
        "run.snapshot_every": 1,
    }))
    assert code == EXIT_RUN_FAILED, text
    assert text.count("recovering in place") == 3, text
    assert "retries after 0, 0.1, 0.2 s did not help in step 1" in text
    assert "The same command would fail in the same way" not in text
    first = text.index("Earlier interruption 1, in step 1: rank 0 (stages vision.0, llm.0) failed")
    assert "MemoryError: no memory for this image" in text[first:] and first > text.index("failed:")


def test_temporary_shortages_do_not_change_any_loss(finished, make_config, raymm, tmp_path):
    """Fail once to start a thread in a rank, and to open a file in a data worker.

    The sample of that file is not skipped.
    """
    make_faults_again()
    run = tmp_path / "short"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 1,
        "model.encoders.vision.preprocess": "tests.support.killing_callbacks:lacks_a_thread_once",
        "data.modalities.vision.processor":
            "tests.support.killing_callbacks:image_without_files_once",
        "data.on_error": "skip",
    }))
    assert code == 0, text
    assert "RuntimeError: can't start new thread: recovery" in text, text
    assert "Too many open files" in text and "skipped" not in text, text
    assert text.count("after a wait of 1 s; recovering in place") == 2, text
    assert curve(run) == curve(finished.path)
