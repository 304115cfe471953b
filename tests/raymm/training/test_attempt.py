"""Run restarts automatically after its processes were lost, up to its limits."""

import random
import signal

import pytest

from raymm.cli.main import EXIT_REPEATS, EXIT_RUN_FAILED, EXIT_USER_ERROR
from raymm.monitor.metrics import read_metrics
from raymm.recovery import failure_policy
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import restore
from raymm.training import attempt
from tests.support.killing_callbacks import kill_actor, make_faults_again
from tests.support.scraping import scrape
from tests.support.tiny_run import STEPS, curve
from tests.support.watching_callbacks import CALLS

KILL = "tests.support.killing_callbacks:KillRanks"
KILL_WORKER = "tests.support.killing_callbacks:KillDataWorker"
ONE_RANK = {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}}


@pytest.fixture
def calls():
    CALLS.clear()
    yield CALLS
    CALLS.clear()


@pytest.fixture
def killed_while_it_restores(monkeypatch):
    """Kill a rank while the first attempt with a checkpoint restores it."""
    ranks = [0]

    def restore_and_lose(*arguments):
        if ranks:
            kill_actor(ranks.pop())
        return restore(*arguments)

    monkeypatch.setattr(attempt, "restore", restore_and_lose)


@pytest.mark.usefixtures("killed_while_it_restores")
def test_restarts_do_not_change_any_loss(
    finished, make_config, raymm, tmp_path, calls
):
    """Kill a rank before the first checkpoint, a data worker, a restoring rank, and any rank.

    The last rank is killed at any step, whether or not its checkpoint is recent.
    """
    step, rank = random.randrange(7, STEPS - 2), random.randrange(2)
    run = tmp_path / "started-anew"  # no other test counts restarts of this name
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.max_failures": 4,
        # Otherwise a kill right after a step may interrupt that step's checkpoint.
        "run.asynchronous_checkpoints": False, "run.callbacks": [
            {KILL: {"after": [1, step], "rank": rank}},
            {KILL_WORKER: {"after": [3]}}, "tests.support.watching_callbacks:Recorder",
        ],
    }))
    assert code == 0, text
    assert "failure 4 of at most 4 (run.max_failures); restarting" in text
    assert curve(run) == curve(finished.path), (step, rank)
    told = [(kind, value) for kind, value in calls if kind in ("start", "restart", "end")]
    # A callback that misses a failed restart is called for the next one.
    assert [kind for kind, _ in told] == ["start", "restart", "restart", "restart", "end"]
    restarts = [value for kind, value in told if kind == "restart"]
    assert [restart.number for restart in restarts] == [1, 3, 4]
    assert {restart.cause for restart in restarts} == {"failure"}
    assert restarts[0].run.first_step == 0 and "died" in restarts[0].text
    last = restarts[-1].run.first_step
    assert last <= step and last % 2 == 0
    assert told[-1][1].status == "finished"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "restarts" in row]
    assert (rows[-1]["restarts"], rows[-1]["step"]) == (4, last)
    scrape({("raymm_restarts_total", (("run", "started-anew"), ("cause", "failure"))): 3})


def test_signals_end_the_wait_for_resources(make_config, raymm, tmp_path, ray_cluster):
    """Occupy the resources of a rank that was killed."""
    code, text = raymm("train", make_config({
        "run.callbacks": [{KILL: {"after": [3], "take_cpus": True}}],
        "run.wait_for_nodes_s": 600, "parallel": ONE_RANK, "resources": {"cpus": 1},
        "run.asynchronous_checkpoints": False,  # so that step 2 has a checkpoint
    }))
    assert code == 128 + signal.SIGINT, text
    latest = CheckpointStore(tmp_path / "run").latest()
    assert f"stopped by SIGINT before the run resumed: the last checkpoint is {latest}" in text


def test_resources_below_the_minimum_replicas_are_rejected(make_config, raymm, ray_cluster):
    code, text = raymm("train", make_config({
        "parallel": {"language_model": {"dp": {"min": 16, "max": 32}}}, "resources": {"cpus": 1},
        "data.batch_size": 32, "data.microbatches": 32,
    }))
    assert code == EXIT_USER_ERROR and "the plan has 17 ranks of 1 CPU each" in text


def test_a_run_beyond_its_budget_lists_its_interruptions(make_config, raymm, ray_cluster):
    code, text = raymm("train", make_config({
        "run.callbacks": [{KILL: {"after": [3, 6]}}], "run.max_failures": 1, "parallel": ONE_RANK,
    }))
    assert code == EXIT_RUN_FAILED
    assert "rank 0 (stages vision.0, llm.0, process " in text
    assert "Earlier interruption 1, in step " in text
    assert "does not resume by itself: failure 2 exceeds run.max_failures, which is 1" in text
    assert "Run the same command again to resume from" in text and "Traceback" not in text


def test_a_repeated_failure_in_one_step_ends_the_run(make_config, raymm, ray_cluster):
    code, text = raymm("train", make_config({
        "run.callbacks": [{KILL: {"after": [3, 3, 3]}}], "run.steps_in_flight": 1,
        "parallel": ONE_RANK,
    }))
    assert code == EXIT_REPEATS
    assert text.count("restarting with new processes") == 1
    assert "the same failure happened in step 4 before and would recur" in text
    assert "The same command would fail in the same way" in text


def test_an_exception_in_code_ends_the_run(make_config, raymm, ray_cluster):
    code, text = raymm("train", make_config({
        "model.encoders.vision.preprocess": "tests.support.killing_callbacks:raises_in_ranks",
        "parallel": ONE_RANK,
    }))
    assert code == EXIT_REPEATS
    assert "KeyError" in text and "no such column" in text
    assert "restarting" not in text and "the run's code would raise the same error again" in text


def test_a_shortage_without_snapshots_restarts_processes(
    finished, make_config, raymm, tmp_path, monkeypatch
):
    monkeypatch.setattr(failure_policy, "RETRY_WAITS_S", (0.1, 0.2, 0.3))
    make_faults_again()
    code, text = raymm("train", make_config({
        "model.encoders.vision.preprocess": "tests.support.killing_callbacks:lacks_a_thread_once",
    }))
    assert code == 0, text
    assert "after a wait of 0.1 s; restarting with new processes" in text
    assert curve(tmp_path / "run") == curve(finished.path)
