"""Runs that lose nodes: ``python -m tests.cluster.going_on`` in a separate process.

Ray reads its settings once per process.
"""

import shutil
import subprocess
import sys

import pytest

from tests.cluster.rig import ROOT

# Timeout of the whole test: two to three minutes, many times that on a busy machine.
TEST_TIMEOUT_S = 900


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(TEST_TIMEOUT_S)
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the API server's certificate")
def test_runs_recover_from_drained_and_killed_nodes():
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster.going_on"], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, check=False, timeout=TEST_TIMEOUT_S - 30,
    )
    assert done.returncode == 0, done.stdout
    for said in ("drained node: left after step", "0 steps lost", "killed node: after step",
                 "1 -> 2 -> 1 replicas: after steps 4 and"):
        assert said in done.stdout, done.stdout
