"""Peak of resident memory, read without opening files in every step."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from raymm.actors.memory import peak_memory
from raymm.actors.memory.peak_memory import PeakMemory

MIB = 2**20
CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="says nothing of memory")
def test_the_peak_covers_memory_since_the_start(monkeypatch) -> None:
    memory = PeakMemory(CPU)
    monkeypatch.setattr(os, "open", None)  # no file is opened again
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    del held
    assert 60 * MIB < memory.bytes() < 200 * MIB
    memory.restart()
    assert memory.bytes() < 40 * MIB


def test_the_peak_is_none_if_the_system_reports_none(monkeypatch) -> None:
    monkeypatch.setattr(peak_memory, "_STATUS", "/nowhere/status")
    monkeypatch.setattr(peak_memory, "_CLEAR", "/nowhere/clear")
    memory = PeakMemory(CPU)
    memory.restart()
    assert memory.bytes() == 0
