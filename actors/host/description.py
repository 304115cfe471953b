"""Description of the node and the GPU of a process, for ``raymm doctor``."""

from __future__ import annotations

import os
import shutil
from typing import Any, NamedTuple

import torch
from torch.cuda.nccl import version as nccl_version

from raymm.actors.host.gpus import read_gpus
from raymm.actors.host.interfaces import interface_with
from raymm.actors.host.memory import available_memory


class NodeDescription(NamedTuple):
    """Hardware and software of a process's node.

    Attributes:
        driver: version of the GPU driver, and the newest CUDA version that it supports.
        torch_cuda, nccl: versions that torch is built with.
        interfaces: network interfaces of gloo and NCCL, by environment variable.
        free_memory: available host memory in bytes.
        shared_memory: free bytes and size of ``/dev/shm``.
    """

    driver: str
    torch_cuda: str
    nccl: str
    gpu: str
    nvlinks: int
    interfaces: dict[str, str]
    free_memory: int
    shared_memory: tuple[int, int]


def describe_node(device: torch.device, address: str) -> NodeDescription:
    """Describe this process's node, with its address in Ray. Initialises CUDA if ``device`` is a
    GPU."""
    gpus = read_gpus()
    driver = "none" if gpus is None else f"{gpus.driver} (CUDA {gpus.cuda[0]}.{gpus.cuda[1]})"
    name, nvlinks, nccl = "none", 0, "none"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, nvlinks = properties.name, _active_nvlinks(f"GPU-{properties.uuid}")
        nccl = ".".join(map(str, nccl_version()))
    default = interface_with(address) or "default"
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    interfaces = {name: os.environ.get(name, default).removeprefix("=") for name in variables}
    shared = shutil.disk_usage("/dev/shm") if os.path.isdir("/dev/shm") else None
    return NodeDescription(
        driver, torch.version.cuda or "none", nccl, name, nvlinks, interfaces,
        available_memory(), (shared.free, shared.total) if shared else (0, 0),
    )


def _active_nvlinks(uuid: str) -> int:
    import pynvml

    def is_active(handle: Any, link: int) -> bool:
        try:
            return pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError:  # the GPU has fewer links
            return False

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return 0
    return sum(is_active(handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
