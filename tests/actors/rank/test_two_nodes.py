"""Processes of a rank are on one node if possible, whichever resources arrived first.

A rank that must span nodes is reported, and ranks have the requested environment.
"""

import subprocess
import sys

import pytest

from tests.support import SUPPORT

# Timeout for two nodes' servers and nine processes that import all packages, on a busy machine.
PATIENCE_S = 600


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.timeout(PATIENCE_S + 10)
def test_ranks_of_several_processes_on_nodes_of_different_sizes():
    script = SUPPORT / "two_nodes.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    first, *_, second = done.stdout.split("said: ")
    # Ranks of 1, 2 and 2 processes on nodes of 2 and 3.
    assert "nodes: [0, 0, 0, 3, 3] [0, 0, 0, 1, 1]" in first
    # One of 4 and one of 1: the former must span nodes, its tensor groups need not.
    assert second.startswith(
        "process groups span nodes and use slower links: rank 1 (llm.0; cp 2) has processes on "
        "2 nodes"
    )
    assert done.stdout.count("have the variable: [True, True, True, True, True]") == 2
    # Costs by links, other nodes: the same numbers.
    losses = [line for line in done.stdout.splitlines() if line.startswith("loss:")]
    assert len(losses) == 2 and losses[0] == losses[1]
