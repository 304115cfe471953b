"""Processes are bound to the NUMA node of their GPU, if the system reports it."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raymm.actors.host.gpus import bind_to_gpu_node

GPU = torch.device("cuda", 0)


@pytest.fixture
def bound(monkeypatch) -> dict[int, set[int]]:
    """Record the CPUs of each bound thread, in a process that may use the CPUs 0 to 15."""
    bound: dict[int, set[int]] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(os, "sched_setaffinity", bound.__setitem__)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return bound


def sysfs(folder: Path, node: str, cpus: str) -> Path:
    files = {"bus/pci/devices/0000:c1:00.0/numa_node": node,
             f"devices/system/node/node{node}/cpulist": cpus}  # fmt: skip
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    return folder


def test_threads_are_bound_to_allowed_cpus_of_the_node(tmp_path, bound) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=ended.wait)
    thread.start()
    assert bind_to_gpu_node(GPU, sysfs(tmp_path, "1", "4-7,12,24-31")) == 1
    ended.set()
    thread.join()
    assert bound[threading.get_native_id()] == {4, 5, 6, 7, 12}
    assert len(bound) > 1 and set(map(tuple, bound.values())) == {(4, 5, 6, 7, 12)}


@pytest.mark.parametrize(("node", "cpus"), [("-1", "0-15"), ("1", "16-31"), ("1", "")])
def test_nothing_is_bound_without_a_node_or_cpus(tmp_path, bound, node, cpus) -> None:
    assert bind_to_gpu_node(GPU, sysfs(tmp_path, node, cpus)) is None
    assert bind_to_gpu_node(GPU, tmp_path / "no sysfs") is None
    assert not bound
