"""Ten things that go wrong, in a run of their own (:mod:`tests.soak`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KILLS = 10


@pytest.mark.system
@pytest.mark.ray
@pytest.mark.timeout(600)  # two runs of a hundred steps, on a machine that may be busy
def test_a_run_in_which_things_go_wrong_is_the_run_without() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak", "--kills", str(KILLS), "--seed", "1"], cwd=ROOT,
        capture_output=True, text=True, timeout=580, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    assert summary["bit_identical"] == summary["named"] == summary["over"] == KILLS
    assert summary["whole_run_identical"] and summary["samples_once"]
    assert summary["most_steps_redone"] <= 1 and summary["processes_left"] == 0
