"""Runs that lose one of Ray's servers, which is really killed.

Each ends with a message and the documented exit code, and leaves no process.
"""

import os
import re
import signal
import time

import pytest

from raymm.actors.placement.placement import LINE_EVERY_S
from raymm.storage.checkpoint import CheckpointStore
from tests.support.processes import all_gone, descendants, end_group, ranks_of, titles, wait_until
from tests.support.tiny_run import start

PATIENCE_S = 240.0
ONE_RANK = {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}}
# After a lost GCS, Ray itself ends the driver with code 1 after a minute. raymm's message must be
# printed earlier.
BY_RAY = "Failed to connect to GCS within"
# Either Ray or raymm detects the loss first.
ENDED = "ended without reporting|Ray server .raylet. does not listen|the Ray cluster has lost it"


# Moments of the kill: log lines, or the first process of a rank before it is connected.
STEP, WAITING, ACTORS = "\nstep ", "\nwaiting for nodes, ", "actors are created"
# Requirements that no node satisfies. While it waits, the driver's main thread queries Ray for the
# nodes, which blocks without the GCS.
NO_ROOM = {"resources.cpus": 500, "run.wait_for_nodes_s": 600}
NO_ANSWER = r"the Ray cluster's server \(GCS\) at .* has not answered for"


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(600)
@pytest.mark.cells(4)
@pytest.mark.parametrize(("server", "mark", "signals", "code", "said"), [
    ("gcs_server", STEP, 1, 143, r"stopped by SIGTERM after step \d+ of 100000: saved in "),
    ("gcs_server", STEP, 0, 1, NO_ANSWER),
    ("gcs_server", WAITING, 1, 143, "stopped by SIGTERM before the first step: nothing was tr"),
    ("gcs_server", WAITING, 0, 1, NO_ANSWER),
    ("gcs_server", ACTORS, 1, 143, "stopped by SIGTERM before the first step: nothing was tr"),
    ("gcs_server", ACTORS, 0, 1, NO_ANSWER),
    ("DashboardAgent", STEP, 0, 1, ENDED),
    ("raylet", STEP, 0, 1, ENDED),
])
def test_a_lost_server_ends_the_run(server, mark, signals, code, said, make_config, tmp_path):
    config = make_config({
        "parallel": ONE_RANK, "run.steps": 100_000, "run.checkpoint_every": 100_000,
        "data.modalities.vision.processor": "tests.support.run_processors:slow_image",
        **(NO_ROOM if mark == WAITING else {}),
    })
    log = tmp_path / "log"
    driver = start(["train", config], tmp_path, log)
    try:
        def reached():
            if driver.poll() is not None:
                return True
            return ranks_of(driver.pid) if mark == ACTORS else mark in log.read_text()

        wait_until(reached, PATIENCE_S, mark)
        started = descendants(driver.pid)
        (victim,) = (
            pid for pid, title in titles(started).items()
            if re.match(rf"\S*{server}( |$)", title.strip())
        )
        os.kill(victim, signal.SIGKILL)
        for _ in range(signals):
            wait_until(lambda: all_gone({victim}), 30, "its end")
            if mark == WAITING:
                time.sleep(LINE_EVERY_S + 2.0)
            driver.send_signal(signal.SIGTERM)
        driver.wait(PATIENCE_S)
    finally:
        end_group(driver.pid)
        driver.wait()
    assert driver.returncode == code, log.read_text()
    # The second process prints after the driver has ended.
    wait_until(lambda: re.search(said, log.read_text()), 60, f"the sentence {said}")
    text = log.read_text()
    assert BY_RAY not in text and "Traceback" not in text, text
    saved = CheckpointStore(tmp_path / "run").latest() is not None
    assert saved == (signals > 0 and mark == STEP)
    wait_until(lambda: all_gone(started), 60, "the end of all processes of the run")
