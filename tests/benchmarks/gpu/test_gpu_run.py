"""The whole run of sections, on a CPU without Ray, OR-tools and numba."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.processes import NO_DEVICE
from benchmarks.gpu.sections import SECTIONS
from tests.support.bare_environment import bare_command

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.system
def test_every_section_runs_with_four_packages(tmp_path):
    site, output = tmp_path / "site", tmp_path / "results.json"
    site.mkdir()
    command, environment = bare_command(site)
    assert not any((site / name).exists() for name in ("ray", "numba", "ortools", "xxhash"))
    run = subprocess.run(
        [*command, "-m", "benchmarks.gpu", "--device", "cpu", "--output", str(output),
         "--seconds", "3000", "--sections", *(section.name for section in SECTIONS)],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    results = json.loads(output.read_text())["sections"]
    failures = {
        (name, part): row for name, section in results.items()
        for part, row in section["parts"].items() if row["state"] != "ok"
    }
    assert not failures, (failures, run.stderr)
    assert run.returncode == 0, run.stderr
    assert [*results] == [section.name for section in SECTIONS]
    assert all(section["ok"] for section in results.values())
    versions = results["machine"]["parts"]["device"]["versions"]
    assert versions["ray"] == versions["numba"] == "missing" != versions["torch"]
    for name in results:
        assert f"== {name}: " in run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_reported_as_failure(tmp_path):
    output = tmp_path / "results.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--output", str(output)],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert run.returncode == NO_DEVICE
    assert "no CUDA device" in run.stderr and not output.exists()
