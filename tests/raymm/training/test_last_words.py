"""Runs that are ended from outside still print a message."""

import subprocess
import sys

import pytest

BLOCK = """
import os, signal, subprocess, sys
from raymm.training.last_words import last_words

try:
    with last_words("runs/mine"):
        {end}
except RuntimeError:
    pass
"""
SENTENCE = "which drove the run in runs/mine, ended without reporting a cause"


@pytest.mark.parametrize(("end", "code", "said"), [
    ("os._exit(1)", 1, True),  # as Ray's C++ code does
    ("os.abort()", -6, True),
    ("os.kill(os.getpid(), signal.SIGKILL)", -9, True),
    ("pass", 0, False),
    ("raise RuntimeError", 0, False),
    ("sys.exit(75)", 75, False),
])
def test_only_processes_without_a_message_get_one(end, code, said):
    child = subprocess.run(
        [sys.executable, "-c", BLOCK.format(end=end)], capture_output=True, text=True, timeout=60,
    )
    assert child.returncode == code
    assert (SENTENCE in child.stderr) == said, child.stderr
    assert ("Run the same command again" in child.stderr) == said
