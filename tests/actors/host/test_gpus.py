"""Checks of a node's driver, compiler and headers, and the binding of a rank to a NUMA node.

Versions and paths are simulated.
"""

import os
import shutil
import sysconfig
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from raymm.actors.host import gpus
from raymm.actors.host.gpus import Gpus, bind_to_gpu_node, check_gpu_node, read_gpus
from raymm.actors.rank.rank_actor import RankActor
from raymm.actors.rank.rank_spec import RankSpec
from raymm.errors import ClusterError

GPU = torch.device("cuda", 0)


@pytest.fixture
def node(monkeypatch):
    """Simulate a node with these versions of driver and torch."""

    def make(driver, cuda, torch_version, built_for):
        monkeypatch.setattr(gpus, "read_gpus", lambda: Gpus(driver, cuda, ("NVIDIA H100 PCIe",)))
        version = SimpleNamespace(cuda=built_for)
        stub = SimpleNamespace(__version__=torch_version, version=version)
        monkeypatch.setattr(gpus, "torch", stub)

    return make


@pytest.mark.parametrize("driver, cuda, built_for", [
    ("580.65.06", (13, 0), "13.0"), ("580.65.06", (13, 0), "13.2"), ("590.1", (13, 1), "12.8"),
    ("525.60.13", (12, 0), "12.8"), ("570.10", (12, 8), "12.6"),
])  # fmt: skip
def test_drivers_of_the_same_or_a_newer_cuda_are_accepted(node, driver, cuda, built_for):
    node(driver, cuda, "2.14.1", built_for)
    check_gpu_node()


@pytest.mark.parametrize("driver, cuda, built_for, remedies", [
    ("550.54.15", (12, 4), "13.0", ["to 580 or newer", "pip install 'torch<2.11'"]),
    ("470.82", (11, 4), "12.8", ["to 525 or newer", "https://pytorch.org/"]),
    ("580.65.06", (13, 0), "14.0", ["update the driver,", "https://pytorch.org/"]),
])
def test_an_old_driver_is_named_with_both_remedies(node, driver, cuda, built_for, remedies):
    node(driver, cuda, "2.14.1", built_for)
    with pytest.raises(ClusterError) as error:
        check_gpu_node()
    for text in (driver, f"{cuda[0]}.{cuda[1]}", f"CUDA {built_for}", "torch 2.14.1", *remedies):
        assert text in str(error.value)


def test_a_torch_without_cuda_is_named(node):
    node("580.65.06", (13, 0), "2.14.1+cpu", None)
    with pytest.raises(ClusterError, match=r"torch 2.14.1\+cpu is built without CUDA"):
        check_gpu_node()


def test_a_rank_checks_its_node_before_it_initialises_cuda(node, monkeypatch):
    node("550.54.15", (12, 4), "2.14.1", "13.0")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: pytest.fail("CUDA is initialised"))
    rank = RankActor(RankSpec(0, 1, {}, (), device="cuda"))
    with pytest.raises(ClusterError, match="550.54.15"):
        rank.connect({})


def test_a_rank_computes_fp32_in_fp32():
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    RankActor(RankSpec(0, 1, {}, ()))
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_a_missing_compiler_or_header_is_named(node, monkeypatch, tmp_path):
    node("580.65.06", (13, 0), "2.14.1", "13.0")
    monkeypatch.delenv("CC", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        with pytest.raises(ClusterError, match="gcc and clang are missing .*apt-get install gcc"):
            check_gpu_node()
        patch.setattr(shutil, "which", lambda name: name if name == "clang" else None)
        check_gpu_node()
        patch.setenv("CC", "/opt/gcc")
        with pytest.raises(ClusterError, match="CC is '/opt/gcc', which is missing"):
            check_gpu_node()
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    with pytest.raises(ClusterError, match=f"{tmp_path}/Python.h is missing .*python3-dev"):
        check_gpu_node()


def test_hidden_gpus_are_not_read(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert read_gpus() is None


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
