"""Plan for little memory, run by real actors: within the limit, and the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(650)  # minutes of planning and profiling; the command has its own limit
def test_actors_stay_within_the_limit_with_the_same_losses():
    """Profile, plan and run; check resident memory of the actors, and losses bit for bit."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recomputation", "--json", "--only", "measured",
         "--steps", "1"],
        cwd=ROOT, env={**os.environ, "RAY_ADDRESS": ""}, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["within_limit"] and found["same_losses"], done.stderr
    peak = found["peak_mib"]
    assert peak["all_again"] < peak["chosen"] <= found["limit_mib"] < peak["keep"]
