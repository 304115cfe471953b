"""First use with a folder and a file, for every kind of tiny model: create, train, resume."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from examples.vlm import tiny
from examples.vlm.kinds import KINDS

STEPS = 2


def raymm(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "raymm", *arguments], capture_output=True, text=True, timeout=280,
        cwd=cwd,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ray
@pytest.mark.system
@pytest.mark.cells(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_made_and_trained_by_two_commands(kind, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tiny", kind, "--out", "tiny", "--samples", "8"])
    tiny.main()
    command = capsys.readouterr().out.splitlines()[-1].split()
    assert command[:2] == ["raymm", "train"]
    raymm(*command[1:], "--set", f"run.steps={STEPS}", cwd=tmp_path)
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
    assert len(losses) == STEPS and all(map(math.isfinite, losses)) and losses[0] != losses[1]
