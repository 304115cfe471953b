"""Restarts of a run after interruptions."""

from pathlib import Path

import pytest

from raymm.errors import CheckpointError, ClusterError, FailureKind, RankFailedError, RunFailedError
from raymm.recovery.failure_policy import Cause, FailurePolicy
from raymm.recovery.run_controller import RunController, RunState
from raymm.training import restarts
from raymm.training.restarts import Attempted, Restarts, what_is_left
from raymm.training.result import Result
from raymm.training.stop_request import StopReason, StopRequest

DONE = Result({"step": 4}, [], None, Path())


@pytest.fixture(autouse=True)
def no_dead_nodes(monkeypatch):
    """Answer for Ray, which does not run here."""
    monkeypatch.setattr(restarts, "dead_nodes", frozenset)


def run(*outcomes, max_failures=2):
    """Return the restarts, the arguments of the attempts, and the result of a run."""
    stop, told, lines = StopRequest(), [], []
    steps = iter(range(1, 9))
    controller = RunController(FailurePolicy(max_failures, 1, 1), lambda: next(steps))
    remaining = iter(outcomes)

    def attempt(attempted):
        told.append(attempted)
        outcome = next(remaining)
        if callable(outcome):
            return outcome(stop)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def ended():
        return Restarts(controller, stop, lines.append).until_done(attempt)

    return ended, told, lines, controller


def test_a_lost_rank_starts_another_attempt() -> None:
    ended, told, lines, controller = run(RankFailedError("rank 1 died\nand more"), DONE)
    assert ended() is DONE and controller.state is RunState.FINISHED
    assert told == [None, Attempted(1, Cause.FAILURE, "rank 1 died")]
    assert lines == ["rank 1 died: failure 1 of at most 2 (run.max_failures); restarting with new "
                     "processes"]  # fmt: skip


def test_a_run_beyond_its_budget_names_earlier_interruptions() -> None:
    ended, _, _, controller = run(
        RankFailedError("first"), RankFailedError("second"), max_failures=1
    )
    with pytest.raises(RankFailedError, match="second") as caught:
        ended()
    assert controller.state is RunState.FAILED
    assert caught.value.__notes__[0] == "Earlier interruption 1, in step 1: first"
    assert "failure 2 exceeds run.max_failures, which is 1" in caught.value.__notes__[-1]


def test_only_a_cluster_without_room_at_the_start_is_an_error() -> None:
    with pytest.raises(ClusterError, match="no room"):
        run(ClusterError("no room"))[0]()

    def drained(stop):
        stop.ask(StopReason("a notice", cause=Cause.PREEMPTION))
        return Result({}, [], None, Path(), stopped="stopped by a notice")

    ended, told, lines, _ = run(drained, ClusterError("no room"))
    assert ended().stopped == "stopped by a notice" and told[1].cause is Cause.PREEMPTION
    assert lines[-1].startswith("the run could not resume: no room. Run the same command again")


def test_a_requested_stop_ends_the_run_after_a_failure() -> None:
    def stopped(stop):
        stop.ask(StopReason("SIGTERM", 15))
        raise RankFailedError("rank 0 died")

    with pytest.raises(RankFailedError) as caught:
        run(stopped, DONE)[0]()
    assert "SIGTERM requested the end of the run" in caught.value.__notes__[-1]


@pytest.mark.parametrize(("error", "latest", "words"), [
    (RunFailedError("x"), lambda: "step-4", "resume from step-4"),
    (RunFailedError("x"), lambda: None, "starts from the beginning"),
    (RankFailedError("x", FailureKind.USER), lambda: "step-4", "would fail in the same way"),
])  # fmt: skip
def test_a_failed_run_says_how_to_continue(error, latest, words) -> None:
    assert words in what_is_left(error, latest)


def test_an_unreadable_storage_is_named() -> None:
    def latest():
        raise CheckpointError("no disk")

    assert what_is_left(RunFailedError("x"), latest).endswith("last checkpoint: no disk")
