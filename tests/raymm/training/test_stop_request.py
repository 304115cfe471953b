"""Signals in every phase of a run: it ends with a correct message, and no torn checkpoint.

Signals from other processes are in ``test_failure`` and ``test_job_submit``.
"""

import os
import signal
import threading
import time

import pytest

from raymm.cli.main import EXIT_START_AGAIN
from raymm.monitor.metrics import MetricsLog
from raymm.recovery.failure_policy import Cause
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from raymm.training.stop_request import (
    SAME_SIGNAL_S,
    StopReason,
    StopRequest,
)
from raymm.training.trainer import Trainer
from raymm.training.training_loop import Batches
from tests.support.tiny_run import curve

ONE_RANK = {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}}
TERMINATED = 128 + signal.SIGTERM


def me(number: int = signal.SIGTERM) -> None:
    """Send a real signal to this process; its handler has run when this function returns."""
    os.kill(os.getpid(), number)
    time.sleep(0.01)


@pytest.fixture
def handlers():
    """Fail a test that does not restore the signal handlers."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.fixture
def train(ray_cluster, make_config, raymm, tmp_path, inputs, handlers, monkeypatch):
    """Return a function that trains with signals where ``where`` is called.

    The function returns exit code, output, steps and checkpoint.
    """

    def run(owner, name, signals, **changes):
        original = getattr(owner, name)

        def signalled(*args, **options):
            signals(*args)
            return original(*args, **options)

        monkeypatch.setattr(owner, name, signalled)
        code, text = raymm("train", make_config({
            "parallel": ONE_RANK, "run.steps": 6, "run.checkpoint_every": 4, **changes,
        }))
        monkeypatch.setattr(owner, name, original)
        assert "Traceback" not in text
        latest = CheckpointStore(tmp_path / "run").latest()
        metrics = tmp_path / "run" / "metrics.jsonl"
        steps = len(curve(tmp_path / "run")) if metrics.is_file() else 0
        return code, text, steps, latest

    return run


def test_a_signal_before_the_first_step_saves_nothing(train):
    """Signal while ranks are about to start."""
    code, text, steps, latest = train(
        Trainer, "_say_what_runs", lambda *_: me(signal.SIGINT)
    )
    assert (code, steps, latest) == (128 + signal.SIGINT, 0, None)
    assert "stopped by SIGINT before the first step: nothing was trained, there is no" in text


def test_signals_between_steps_and_in_the_last_step(train, raymm, make_config, tmp_path):
    """Send SIGTERM twice, as `timeout` does; after a restart, signal in the last step."""
    code, text, steps, latest = train(
        MetricsLog, "add", lambda _, row: (me(), me()) if row["step"] == 2 else None
    )
    # Two steps are in flight: the second one is finished, too.
    assert code == TERMINATED and steps == read_manifest(latest).step == 3
    assert f"stopped by SIGTERM after step 3 of 6: saved in {latest}" in text

    code, text, steps, latest = train(
        MetricsLog, "add", lambda _, row: me() if row["step"] == 6 else None
    )
    assert (code, steps) == (0, 6) and read_manifest(latest).step == 6
    assert "stopped" not in text and "loss curve" in text


def test_signals_during_evaluation_and_data_waits(train, inputs, tmp_path):
    """Check that the evaluation is aborted, and the wait for data ends immediately."""
    heldout = {"data.heldout": str(inputs / "heldout.jsonl"), "run.eval_every": 2}
    asked = []

    def signals(batches, steps, shuffled, *_):
        asked.append(shuffled)
        if len(asked) == 3:  # after step 2; two before the first step
            me()

    code, text, steps, latest = train(Batches, "heldout", signals, **heldout)
    assert code == TERMINATED and steps == read_manifest(latest).step == 2
    assert "The held-out evaluation after step 2 was skipped" in text

    # In another thread, because the main thread is about to wait for data that never arrive.
    changes = {"data.modalities.vision.processor": "tests.support.run_processors:late_image"}
    code, text, steps, latest = train(
        MetricsLog, "add",
        lambda _, row: threading.Timer(0.5, me).start() if row["step"] == 3 else None,
        **changes,
    )
    assert code == TERMINATED and steps == read_manifest(latest).step
    assert f"stopped by SIGTERM after step {steps} of 6" in text


def test_a_signal_during_a_save_and_a_second_one(train, tmp_path):
    """Finish the save after the first signal; abort after a second, later one."""
    code, text, steps, latest = train(CheckpointStore, "start", lambda *_: me())
    assert code == TERMINATED and steps == read_manifest(latest).step == 4
    assert f"stopped by SIGTERM after step 4 of 6: saved in {latest}" in text

    def twice(*_):
        me()
        time.sleep(SAME_SIGNAL_S + 0.1)
        me()

    code, text, steps, again = train(CheckpointStore, "save", twice)
    assert (code, steps, again) == (TERMINATED, 6, latest)
    assert "stopped by SIGTERM immediately: 2 unsaved steps are lost, the last che" in text


def test_a_time_limit_stops_the_run(raymm, make_config, ray_cluster, tmp_path):
    """Stop after a time limit in steps, and while waiting for nodes."""
    code, text = raymm("train", make_config({
        "parallel": ONE_RANK, "run.steps": 100_000, "run.checkpoint_every": 100_000,
        "run.max_seconds": 6,
    }))
    assert code == EXIT_START_AGAIN and "Traceback" not in text
    latest = CheckpointStore(tmp_path / "run").latest()
    if latest is None:  # on a machine that is too busy for a step
        assert "nothing was trained" in text or "no step was taken" in text
    else:
        step = read_manifest(latest).step
        assert f"run.max_seconds (6) after step {step} of 100000: saved in {latest}" in text
        assert curve(tmp_path / "run")[-1][0] == step
        assert "Run the same command again to resume" in text

    code, text = raymm("train", make_config({
        "parallel": ONE_RANK, "run.storage_path": str(tmp_path / "waiting"), "run.max_seconds": 3,
        "run.wait_for_nodes_s": 600, "resources": {"cpus": 1000},
    }))
    assert code == EXIT_START_AGAIN and "Traceback" not in text
    assert "stopped by run.max_seconds (3) before the first step: nothing was trained" in text


def test_priorities_of_stop_requests():
    """Check that a signal has the highest priority, and draining the lowest."""
    stop = StopRequest()
    with stop.asking_after(0.01):
        while stop.reason is None:
            time.sleep(0.01)
    limit = stop.reason
    assert limit.why == "run.max_seconds (0.01)"
    leave, other = StopReason("a notice", cause=Cause.PREEMPTION), StopReason("a program")
    number = StopReason("SIGTERM", signal.SIGTERM)
    for reasons, counts in (
        ((leave, limit), limit), ((limit, leave), limit), ((limit, other), limit),
        ((limit, number), number), ((number, limit), number), ((leave, number), number),
    ):
        stop = StopRequest()
        for reason in reasons:
            stop.ask(reason)
        assert stop.reason is counts
    with StopRequest().asking_after(60.0), StopRequest().asking_after(None):
        timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    assert all(timer.finished.is_set() for timer in timers)  # no timer outlives its run


def test_stop_requests_from_threads_and_libraries(handlers):
    """Check that other stop requests behave like signals, and that only the CLI exits."""
    stop = StopRequest()
    stop.ask(StopReason("the time limit"))
    stop.ask(StopReason("another"))
    assert stop.reason.why == "the time limit" and list(stop.until_asked([1, 2])) == []
    stop = StopRequest()
    with stop.listening(), pytest.raises(KeyboardInterrupt):
        me(signal.SIGTERM)
    end = stop.error("saved")
    assert isinstance(end, SystemExit) and end.code == 143 and str(end) == "saved"
    end = StopRequest().error("saved")
    assert isinstance(end, KeyboardInterrupt) and str(end) == "saved"
    stop, seen = StopRequest(), []
    with stop.listening(), stop.deferred():
        for item in stop.until_asked(range(5)):
            seen.append(item)
            if item == 2:
                me(signal.SIGINT)
    assert seen == [0, 1, 2] and stop.reason.number == signal.SIGINT and not stop.at_once
    found = []

    def elsewhere():
        with StopRequest().listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGTERM)]


@pytest.mark.parametrize("where", ["while an item is awaited", "while an item is used"])
def test_the_first_signal_is_acknowledged(handlers, capfd, where):
    stop = StopRequest()

    def items():
        yield 0
        me()
        yield 1

    with stop.listening(), stop.deferred():
        for _ in stop.until_asked(items() if where == "while an item is awaited" else [0]):
            if where == "while an item is used":
                me()
    assert stop.reason is not None
    assert capfd.readouterr().err.count("SIGTERM: finishing and saving the current step") == 1
