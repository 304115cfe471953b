"""GPUs of a node as its driver reports them, checks of a rank's requirements, and the binding of a
rank to the NUMA node of its GPU."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path
from typing import NamedTuple

import torch

from raymm.errors import ClusterError
from raymm.packages import is_installed

# Oldest driver branch for each major version of CUDA (CUDA's release notes, table of minor version
# compatibility). Within a major version, a driver runs code that newer minor versions compiled.
_OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
# Requirement of the newest torch whose wheels are built for an older major version of CUDA.
_TORCH_FOR_CUDA = {12: "torch<2.11"}


class Gpus(NamedTuple):
    """GPUs of a node; ``cuda`` is the newest version that the driver supports, as (major,
    minor)."""

    driver: str
    cuda: tuple[int, int]
    names: tuple[str, ...]


def read_gpus() -> Gpus | None:
    """Return what NVML reports of this node, without initialising CUDA; None without an NVIDIA
    driver, or where ``CUDA_VISIBLE_DEVICES`` hides all GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    try:
        import pynvml
    except ModuleNotFoundError:  # installed on Linux only
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        names = tuple(map(pynvml.nvmlDeviceGetName, handles))
        version = pynvml.nvmlSystemGetDriverVersion()
        return Gpus(version, (cuda // 1000, cuda % 1000 // 10), names)
    finally:
        pynvml.nvmlShutdown()


def check_gpu_node() -> None:
    """Check that the node meets the requirements of a rank on a GPU. Call this before CUDA is
    initialised.

    Raises:
        ClusterError: torch is built without CUDA or for a newer driver, or Triton cannot compile.
    """
    for problem in (_driver_problem(read_gpus()), _compiler_problem()):
        if problem is not None:
            raise ClusterError(problem)


def _driver_problem(gpus: Gpus | None) -> str | None:
    built_for = torch.version.cuda
    if built_for is None:
        return (
            f"torch {torch.__version__} is built without CUDA, and the device is 'cuda'; install "
            "a build with CUDA (https://pytorch.org/get-started), or set run.device=cpu"
        )
    major = int(built_for.partition(".")[0])
    if gpus is None or gpus.cuda[0] >= major:
        return None
    oldest, requirement = _OLDEST_DRIVER.get(major), _TORCH_FOR_CUDA.get(gpus.cuda[0])
    return (
        f"the GPU driver of this node is {gpus.driver} and supports at most CUDA "
        f"{gpus.cuda[0]}.{gpus.cuda[1]}, but torch {torch.__version__} is built for CUDA "
        f"{built_for}; update the driver"
        + (f" to {oldest} or newer" if oldest else "")
        + f", or install a torch for CUDA {gpus.cuda[0]} "
        + (f"(pip install '{requirement}')" if requirement
           else "(https://pytorch.org/get-started/previous-versions)")
    )  # fmt: skip


def _compiler_problem() -> str | None:
    """Return what Triton lacks for compiling a Python module at its first kernel; None if
    nothing."""
    if not is_installed("triton"):
        return None
    compiler = os.environ.get("CC")
    if shutil.which(compiler or "gcc") is None and (compiler or shutil.which("clang") is None):
        tried = f"CC is {compiler!r}, which is missing" if compiler else "gcc and clang are missing"
        return (
            f"Triton compiles attention kernels with a C compiler, and {tried} on this node; "
            "install one (apt-get install gcc), or set CC to its path (resources.env)"
        )
    # Debian's "posix_local" has no headers; Triton also searches here.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    headers = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    if not headers.is_file():
        return (
            f"Triton compiles attention kernels with Python's headers, and {headers} is missing "
            "on this node; install them (apt-get install python3-dev), or use a Python that comes "
            "with its headers (conda, uv)"
        )
    return None


def bind_to_gpu_node(device: torch.device, sys: Path = Path("/sys")) -> int | None:
    """Bind all threads of this process to the CPUs of its GPU's NUMA node, without excluded CPUs.
    Linux then allocates memory that they touch first on that node.

    Returns:
        The NUMA node; None if it is unknown, or the process may use none of its CPUs.
    """
    properties = torch.cuda.get_device_properties(device)
    domain, bus, slot = (
        getattr(properties, f"pci_{field}_id") for field in ("domain", "bus", "device")
    )
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.0"
    try:
        node = int((sys / f"bus/pci/devices/{address}/numa_node").read_text())
        text = (sys / f"devices/system/node/node{node}/cpulist").read_text()
    except (OSError, ValueError):
        return None
    cpus: set[int] = set()
    for field in filter(None, text.strip().split(",")):
        first, _, last = field.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0) & cpus
    if node < 0 or not allowed:
        return None
    for thread in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(thread.name), allowed)
        except ProcessLookupError:  # the thread has ended meanwhile
            continue
    return node
