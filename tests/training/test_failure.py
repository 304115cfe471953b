"""Killed ranks and drivers, and unreadable data, in the middle of a run."""

import os
import random
import re
import signal
import time
from contextlib import contextmanager, suppress
from functools import partial
from ipaddress import ip_address

import pytest

from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.processes import (
    all_gone,
    descendants,
    end_group,
    listening,
    ranks_of,
    titles,
    wait_until,
)
from tests.support.tiny_run import curve, heldout_rows, start

PATIENCE_S = 240.0
KILLS = 2
# For tests that do not depend on the layout: every process imports torch, which takes seconds.
ONE_RANK = {"encoders": {"vision": {"ranks": [0]}}, "language_model": {"ranks": [0]}}


class Interrupted:
    """Run in separate processes, slow enough to interfere with."""

    def __init__(self, config, folder):
        self.config, self.folder, self.run = config, folder, folder / "run"
        self.starts = 0

    @contextmanager
    def running(self, more_steps):
        """Start the run, wait for that many more steps, then yield its process."""
        self.starts += 1
        self.log = self.folder / f"output-{self.starts}.txt"
        taken = self.last_step()
        process = start(["train", self.config], self.folder, self.log)
        try:
            wait_until(
                lambda: process.poll() is not None or self.went_on(taken, more_steps),
                PATIENCE_S, f"{more_steps} steps after {taken}",
            )
            assert process.poll() is None, self.log.read_text()
            yield process
        finally:
            end_group(process.pid)
            process.wait()

    def last_step(self):
        latest = CheckpointStore(self.run).latest()
        return 0 if latest is None else read_manifest(latest).step

    def went_on(self, taken, more):
        # The metrics of the earlier run may be beyond its checkpoint.
        steps = re.findall(r"^step +(\d+)/", self.log.read_text(), re.MULTILINE)
        return bool(steps) and int(steps[-1]) >= taken + more


@pytest.mark.system
@pytest.mark.timeout(900)  # six starts of a run, with four processes each that import torch
def test_repeated_interruptions_do_not_change_the_run(finished, make_config, tmp_path, raymm):
    """Interrupt one run with a killed rank, SIGTERM, Ctrl-C, and a killed driver."""
    config = make_config({
        "data.modalities.vision.processor": "tests.support.run_processors:slow_image",
        "run.max_failures": 0,
    })
    run = Interrupted(config, tmp_path)

    with run.running(more_steps=3) as driver:
        victim = ranks_of(driver.pid)[1]
        assert len(ranks_of(driver.pid)) == 2
        started = descendants(driver.pid)
        os.kill(victim, signal.SIGKILL)
        assert driver.wait(PATIENCE_S) == 1
        text = run.log.read_text()
        assert "the run failed" in text and "died" in text and "Traceback" not in text
        named = re.search(r"rank (\d) \(stages (.*), process (\d+) on \S+\) died", text)
        assert named and int(named[3]) == victim, text
        assert named[2] == {"0": "vision.0, llm.0", "1": "llm.1"}[named[1]]
        assert "Run the same command again" in text
        wait_until(lambda: all_gone(started), 30, "the end of all processes of the run")
    first = run.last_step()
    assert first >= 2

    # One step each: with prefetched data, a run takes some more before the signal arrives.
    with run.running(more_steps=1) as driver:
        started = descendants(driver.pid)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(PATIENCE_S) == 128 + signal.SIGTERM
        text = run.log.read_text()
        second = run.last_step()
        assert f"stopped by SIGTERM after step {second} of 12: saved in {run.run}" in text
        assert "Traceback" not in text and curve(run.run)[-1][0] == second > first
        wait_until(lambda: all_gone(started), 30, "the end of all processes of the run")

    # Send SIGINT to the whole process group, as a terminal does.
    with run.running(more_steps=1) as driver:
        started = descendants(driver.pid)
        os.killpg(driver.pid, signal.SIGINT)
        assert driver.wait(PATIENCE_S) == 128 + signal.SIGINT
        text, third = run.log.read_text(), run.last_step()
        assert f"stopped by SIGINT after step {third} of 12: saved in {run.run}" in text
        assert "Traceback" not in text and curve(run.run)[-1][0] == third > second
        wait_until(lambda: all_gone(started), 30, "the end of all processes of the run")

    with run.running(more_steps=1) as driver:
        started = descendants(driver.pid)
        assert any("raylet" in title for title in titles(started).values())
        # No other user can reach them.
        addresses = listening(started | {driver.pid})
        assert addresses and all(ip_address(one).is_loopback for one in addresses), addresses
        assert {os.getpriority(os.PRIO_PROCESS, rank) for rank in ranks_of(driver.pid)} == {
            os.getpriority(os.PRIO_PROCESS, driver.pid)
        }
        driver.kill()
        driver.wait(PATIENCE_S)
        wait_until(lambda: all_gone(started), 30, "the end of all processes of the run")
    assert run.last_step() >= third and len(curve(run.run)) < 12

    code, text = raymm("train", make_config())
    assert code == 0 and "resuming from" in text
    assert curve(run.run) == curve(finished.path)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_run_killed_during_a_save_resumes(
    finished, make_config, tmp_path, raymm
):
    """Save in the background of every step, and kill driver and ranks at any moment."""
    run = Interrupted(make_config({
        "data.modalities.vision.processor": "tests.support.run_processors:slow_image",
        "run.max_failures": 0,
        "run.checkpoint_every": 1,
    }), tmp_path)
    draw, steps = random.Random(0), [0]
    for _ in range(KILLS):
        # The save after the second of these steps has waited for that after the first.
        with run.running(more_steps=3) as driver:
            started = descendants(driver.pid)
            victims = [driver.pid, *ranks_of(driver.pid)]
            draw.shuffle(victims)
            time.sleep(draw.uniform(0, 0.3))
            for victim in victims:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            driver.wait(PATIENCE_S)
            wait_until(partial(all_gone, started), 30, "the end of all processes of the run")
        found = CheckpointStore(run.run).newest()
        assert found is not None and found.corrupt == () and found.manifest.step > steps[-1]
        steps.append(found.manifest.step)
    code, text = raymm("train", make_config())
    assert code == 0 and f"resuming from {found.folder}" in text
    assert curve(run.run) == curve(finished.path)


@pytest.fixture
def rows_with_a_corrupt_image(inputs, tmp_path):
    """Return the training rows with one corrupt image."""
    folder = tmp_path / "data"
    folder.mkdir()
    for file in inputs.glob("train*"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "train-5.png").write_bytes(b"\x89PNG\r\n\x1a\n and then nothing")
    return folder


def test_a_corrupt_image_ends_the_run_with_its_path(
    rows_with_a_corrupt_image, make_config, raymm, tmp_path, ray_cluster
):
    """Read in file order: the bad sample is in the second step, after the ranks have started."""
    train = str(rows_with_a_corrupt_image / "train.jsonl")
    config = make_config(
        {"data.train": train, "data.shuffle": False, "parallel": ONE_RANK}
    )
    code, text = raymm("train", config)
    assert code == 2
    assert str(rows_with_a_corrupt_image / "train-5.png") in text and "'train-5'" in text
    assert "Traceback" not in text
    assert len(curve(tmp_path / "run")) <= 1


def test_a_corrupt_image_is_skipped_and_counted(
    rows_with_a_corrupt_image, make_config, raymm, tmp_path, ray_cluster
):
    train = str(rows_with_a_corrupt_image / "train.jsonl")
    config = make_config(
        {"data.train": train, "data.shuffle": False, "data.on_error": "skip", "run.steps": 3,
         "data.heldout": train, "run.eval_every": 3, "run.eval_shuffled": False,
         "parallel": ONE_RANK}
    )
    code, text = raymm("train", config)
    assert code == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped"] for row in rows if "loss" in row] == [0, 1, 0]
    assert [row["heldout_skipped"] for row in heldout_rows(tmp_path / "run")] == [1, 1]
    bad = rows_with_a_corrupt_image / "train-5.png"
    # Once, although it was skipped three times: the first evaluation is before the first step.
    assert text.count(f"step     0  skipped sample 'train-5' ({bad}): cannot be read") == 1
    assert text.count("skipped sample 'train-5'") == 1
    assert "skipped samples in total: 1" in text
