"""A step on the pretended GPU: host waits by file and line, and parity with the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
MINUTES = 5


@pytest.mark.system
@pytest.mark.parametrize("case", ["bf16", "packed", "two ranks"])
def test_the_host_does_not_wait_within_a_step(case):
    command = [sys.executable, "-m", "benchmarks.host_stalls", "--json", "--cases", case]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=MINUTES * 60
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    (measured,) = result["cases"]
    places = measured["waits_by_place"]
    assert places["start"] == places["within"] == {}
    assert measured["waits_at_start"] == measured["waits_per_step"] == 0
    # Losses, the times of tasks and the norm are read, and the device has finished.
    assert measured["waits_at_end"] == sum(places["end"].values()) > 0
    assert any(place.startswith("actors/optimizer/optimizer.py") for place in places["end"])
    assert measured["max_relative_error"] < measured["bound"], measured


WAITING = """
from benchmarks.devices.pretended_gpu.library import load
load()
import torch
from benchmarks.devices.pretended_gpu.device import MixedDevicesError, pretended_gpu
from raymm.kernels.host_copies import on_host, to_device

def waits(of):
    counted.clear()
    of()
    return sum(counted.values())

with pretended_gpu() as counted:
    host = torch.arange(6, device="cpu")
    there = to_device(host, torch.device("cuda"))
    mask = there > 2
    found = {
        "nothing": waits(lambda: (there * 2 + 1).sum()),
        "pinned": waits(lambda: to_device(host, torch.device("cuda"))),
        "known": waits(lambda: on_host(there)),
        "read": waits(lambda: int(there[0])),
        "branch": waits(lambda: bool(mask.all())),
        "mask": waits(lambda: there[mask]),
        "write by mask": waits(lambda: there.clone().__setitem__(mask, 1)),
        "host index": waits(lambda: there[host]),
        "pageable": waits(lambda: host.to("cuda")),
        "pageable, not blocking": waits(lambda: host.to("cuda", non_blocking=True)),
        "back": waits(lambda: there.cpu()),
        "list": waits(lambda: there.tolist()),
        "made of a list": waits(lambda: torch.tensor([1, 2], device="cuda")),
        "synchronize": waits(lambda: torch.cuda.synchronize()),
        "event": waits(lambda: torch.cuda.Event().synchronize()),
    }
    changed = to_device(host, torch.device("cuda"))
    changed += 1
    found["changed there"] = waits(lambda: on_host(changed))
    assert on_host(changed).tolist() == [1, 2, 3, 4, 5, 6]
    try:
        there + host
        raise AssertionError("tensors of two devices were added")
    except MixedDevicesError:
        pass
import json
print(json.dumps(found))
"""
NONE = {"nothing", "pinned", "known"}


def test_exactly_the_waiting_calls_are_counted():
    run = subprocess.run(
        [sys.executable, "-c", WAITING], cwd=ROOT, capture_output=True, text=True,
        timeout=MINUTES * 60,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    counted = json.loads(run.stdout.splitlines()[-1])
    assert {name for name, count in counted.items() if not count} == NONE, counted
