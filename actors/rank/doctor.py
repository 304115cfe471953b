"""Processes that connect like ranks and measure their connections, for ``raymm doctor``."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.cuda.nccl import version as nccl_version

from raymm.actors.faults.task_tracker import task
from raymm.actors.host.gpus import check_gpu_node, read_gpus
from raymm.actors.host.memory import available_memory
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_spec import LINK_CTAS
from raymm.actors.rank.rendezvous import (
    EVERYONE,
    Rendezvous,
    RendezvousActor,
    Timeouts,
    interface_with,
    peers,
    prepare_nccl,
)
from raymm.kernels.collectives.waiting import receive_from, send_to, wait


@dataclass(frozen=True)
class DoctorSpec:
    """Description of one measuring process.

    Attributes:
        device: ``"cpu"`` or ``"cuda"``.
        timeout_s: longest time to wait for another process, in seconds.
    """

    rank: int
    world_size: int
    device: str
    timeout_s: float

    @property
    def modules(self) -> set[str]:
        return set()

    @property
    def ring(self) -> list[tuple[int, int]]:
        """Return (sender, receiver) of every link; the group of a link has the link's index plus 1
        as number."""
        count = self.world_size if self.world_size > 1 else 0
        return [(rank, (rank + 1) % self.world_size) for rank in range(count)]

    @property
    def members(self) -> dict[int, Sequence[int]]:
        links = {n: link for n, link in enumerate(self.ring, start=1) if self.rank in link}
        return {EVERYONE: range(self.world_size), **links}

    @property
    def peers(self) -> set[int]:
        """Return the processes whose actors this process calls."""
        return peers(self.rank, self.members.values())

    def unbuilt(self) -> DoctorSpec:
        return self


class Transfers(NamedTuple):
    """Measured bandwidths in bytes per second.

    Attributes:
        received: from the previous process of the ring, while all processes send at once.
        reduced: bus bandwidth of an all-reduce, the bytes that every process sends.
    """

    received: float
    reduced: float


class DoctorActor(RendezvousActor):
    """Process that ``raymm doctor`` starts on a GPU or CPU to test and time its connections."""

    def __init__(self, spec: DoctorSpec) -> None:
        super().__init__(spec.rank, spec.device, Timeouts.of(spec.timeout_s, None))
        self._spec, self._device = spec, torch.device(spec.device)
        prepare_nccl(self._device)

    @task("meeting the other processes")
    def connect(self, actors: Mapping[int, Any]) -> None:
        """Connect to all processes, and to both neighbours in the ring."""
        if self._device.type == "cuda":
            check_gpu_node()
        spec, rank = self._spec, self._spec.rank
        with self._meeting(spec.members, actors):
            meeting = Rendezvous(self._device, self._store, rank, spec.world_size, self._timeouts)
            self._device = meeting.device
            self._links = {
                link: meeting.new_link(number, *link, ctas=LINK_CTAS)[0]
                for number, link in enumerate(spec.ring, start=1) if rank in link
            }  # fmt: skip

    def build(self) -> int:
        return 0

    def describe_node(self) -> NodeDescription:
        import ray

        return describe_node(self._device, ray.util.get_node_ip_address())

    @task("measuring connections")
    def measure(self, size: int, repeats: int) -> Transfers:
        """Measure sends around the ring, then all-reduces.

        Args:
            size: bytes of a message.
            repeats: measured messages, after one warm-up message; the median counts.

        Raises:
            RuntimeError: received data differ from the data sent.
        """
        spec, number = self._spec, self._spec.rank
        values = size // 4
        sent = torch.full((values,), float(number), device=self._device)
        received = torch.empty_like(sent)
        following, previous = (number + 1) % spec.world_size, (number - 1) % spec.world_size
        seconds: dict[str, list[float]] = {"ring": [], "reduce": []}
        for _ in range(repeats + 1):
            received.fill_(-1)
            self._synchronize()
            start = time.perf_counter()
            if self._links:
                into, out = self._links[previous, number], self._links[number, following]
                works = [
                    receive_from(into, 1 - into.rank(), 0, received),
                    send_to(out, 1 - out.rank(), 0, sent),
                ]
                for work in works:
                    wait(work)
                self._synchronize()
                seconds["ring"].append(time.perf_counter() - start)
                _check(received, float(previous), f"a message from process {previous}")
            total = sent.clone()
            dist.barrier()
            self._synchronize()
            start = time.perf_counter()
            dist.all_reduce(total)
            self._synchronize()
            seconds["reduce"].append(time.perf_counter() - start)
            _check(total, float(sum(range(spec.world_size))), "an all-reduce")
        ring, reduce = (sorted(times[1:]) for times in seconds.values())
        share = 2 * (spec.world_size - 1) / spec.world_size
        return Transfers(
            size / ring[len(ring) // 2] if ring else 0.0,
            share * size / reduce[len(reduce) // 2],
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _check(tensor: torch.Tensor, expected: float, operation: str) -> None:
    wrong = int((tensor != expected).sum())
    if wrong:
        raise RuntimeError(f"{operation} has {wrong} of {tensor.numel()} values wrong")


class DoctorGroup(RankGroup):
    """All processes of ``raymm doctor``; none of them is replaced."""
    actor_class = DoctorActor
    renews = False


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
