"""Run whose samples are streamed from a real S3 server, killed in the middle of one."""

import os
import signal
import threading
from collections import Counter

import pytest

from raymm.actors.storage.location import storage_folder
from raymm.monitor.metrics import SAMPLES, read_metrics
from raymm.storage.checkpoint import CheckpointStore
from tests.support.processes import all_gone, end_group, wait_until
from tests.support.s3_server import S3Server
from tests.support.tiny_run import curve, start

PATIENCE_S = 240.0
# There are 9 pictures, and 4 of 13 rows have none: this one is in the third or fourth step.
HELD = 8


class HeldPicture:
    """Picture for which the server never responds and blocks all other requests."""

    def __init__(self, server: S3Server) -> None:
        self.reached, self._goes_on = threading.Event(), threading.Event()
        self._asked, self._server = 0, server
        server.before = self._hold

    def _hold(self, method: str, key: str) -> None:
        if method == "GET" and ".png" in key:
            self._asked += 1
            if self._asked == HELD:
                self.reached.set()
                self._goes_on.wait(PATIENCE_S)

    def let_go(self) -> None:
        self._goes_on.set()
        self._server.before = lambda method, key: None


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_run_killed_in_a_stream_resumes_at_the_sample(
    s3, finished, inputs, make_config, raymm, joins, tmp_path
):
    """Check bitwise equality with a run on local files, and every sample once per epoch."""
    import ray._private.state

    source = storage_folder(s3.url("stream"))
    for file in inputs.glob("train*"):
        source.replace(file.name, file.read_bytes())
    url = s3.url("stream/train.jsonl")
    config = make_config({"data.train": url, "run.log_samples": True})
    before = ray._private.state.actors()
    picture = HeldPicture(s3)
    driver = start(["train", config], tmp_path, tmp_path / "killed.txt", **joins)
    try:
        wait_until(
            lambda: picture.reached.is_set() or driver.poll() is not None, PATIENCE_S, "a picture"
        )
        # Earlier steps continue, and are saved.
        wait_until(
            lambda: CheckpointStore(tmp_path / "run").newest() or driver.poll() is not None,
            PATIENCE_S, "a checkpoint",
        )
        assert driver.poll() is None, (tmp_path / "killed.txt").read_text()
        actors = [
            actor for name, actor in ray._private.state.actors().items()
            if name not in before and actor["State"] == "ALIVE"
        ]
        assert any("DataWorker" in actor["ActorClassName"] for actor in actors)
        pids = {actor["Pid"] for actor in actors}
        for pid in (driver.pid, *pids):
            os.kill(pid, signal.SIGKILL)
        driver.wait(PATIENCE_S)
        wait_until(lambda: all_gone(pids), PATIENCE_S, "the end of the ranks")
    finally:
        end_group(driver.pid)
        picture.let_go()

    code, text = raymm("train", config)
    assert code == 0, text
    assert "resuming from" in text
    run = tmp_path / "run"
    assert curve(run) == curve(finished.path)
    rows = read_metrics(run / SAMPLES)
    assert [row["step"] for row in rows] == list(range(1, 13))
    times = Counter(id for row in rows for ids in row["microbatches"] for id in ids)
    # 48 samples are three epochs of 13, and 9 of the fourth.
    assert len(times) == 13 and Counter(times.values()) == {3: 4, 4: 9}

    # Another file under the same name is detected before anything starts.
    lines = (inputs / "train.jsonl").read_text().splitlines(keepends=True)
    source.replace("train.jsonl", "".join([*lines[1:], lines[0]]).encode())
    code, text = raymm("train", make_config({"data.train": url, "run.steps": 14}))
    assert code == 2 and "data.train" in text and "cannot resume from" in text
