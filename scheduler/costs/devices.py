"""Devices of the analytic cost model: peak rates, memory, links.

Rates are the vendors' data-sheet values, without sparsity:

- Each device names its source. H100 and H200 are the SXM modules; PCIe cards have longer names.
  Data-sheet rates that are only given with sparsity are halved.
- fp32 is the rate of the ordinary cores, because torch does not use TF32 for matrix products by
  default.
- Memory is in decimal gigabytes, slightly less than what the driver reports.

Links are one direction of one GPU: NVLink or PCIe within a node, and a network of 200 or 400 Gbit/s
per GPU across nodes. Latencies and ``efficiency`` are not data-sheet values but round figures of
what large messages and matrix products usually reach; a measured profile replaces them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from raymm.errors import PlanError


@dataclass(frozen=True)
class Link:
    """Time model of a message: ``latency + bytes / bandwidth`` (seconds, bytes per second)."""

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        if not (self.latency >= 0 and self.bandwidth > 0):
            raise PlanError(
                f"a link has latency {self.latency} and bandwidth {self.bandwidth}; the latency "
                "must be at least 0, the bandwidth above 0"
            )

    def seconds(self, size: float) -> float:
        """Return the seconds of a message of ``size`` bytes."""
        return self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Links:
    """Links between processes, which fill nodes in the order of their numbers.

    Attributes:
        within_node, across_nodes: the links; each process has separate ones.
        nodes: node of each process, where known; overrides ``per_node``.
    """

    within_node: Link
    across_nodes: Link
    per_node: int
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if type(self.per_node) is not int or self.per_node < 1:
            raise PlanError(f"per_node is {self.per_node!r}; it must be a whole number >= 1")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Links:
        """Return the links of a dict made by ``asdict``, also from JSON."""
        within, across = Link(**data["within_node"]), Link(**data["across_nodes"])
        fields = {
            k: v for k, v in data.items() if k not in ("within_node", "across_nodes", "nodes")
        }
        return cls(within, across, **fields, nodes=tuple(data.get("nodes", ())))

    def node(self, process: int) -> int:
        return self.nodes[process] if self.nodes else process // self.per_node

    def between(self, processes: Iterable[int]) -> Link:
        """Return the slowest link that a group of processes needs."""
        nodes = map(self.node, processes)
        first = next(nodes, None)
        return self.across_nodes if any(node != first for node in nodes) else self.within_node

    def among(self, nodes: Collection[int]) -> Link:
        """Return the slowest link that processes on these nodes need."""
        return self.within_node if len(nodes) < 2 else self.across_nodes


@dataclass(frozen=True)
class DeviceSpec:
    """One device.

    Attributes:
        flops: dense peak FLOP/s by compute dtype, ``"bf16"`` and ``"fp32"``.
        memory_bandwidth: bytes per second.
        within_node, across_nodes: links from one rank to another.
        efficiency: fraction of the peak that large matrix products reach.
        to_host: bytes per second to host memory, and at the same time back; None if device and host
            share memory.
    """

    name: str
    flops: Mapping[str, float]
    memory_bandwidth: float
    memory_bytes: int
    within_node: Link
    across_nodes: Link
    efficiency: float = 0.6
    to_host: float | None = None

    def __post_init__(self) -> None:
        if self.to_host is not None and not self.to_host > 0:
            raise PlanError(f"to_host of {self.name!r} is {self.to_host}; it must be above 0")
        rates = {**self.flops, "memory_bandwidth": self.memory_bandwidth,
                 "memory_bytes": self.memory_bytes, "efficiency": self.efficiency}
        for name, value in rates.items():
            if not value > 0:
                raise PlanError(f"{name} of {self.name!r} is {value}; it must be above 0")
        if self.efficiency > 1:
            raise PlanError(f"efficiency of {self.name!r} is {self.efficiency}; at most 1")

    def peak(self, dtype: str) -> float:
        """Return the dense peak FLOP/s of a compute dtype; raise ``PlanError`` if it is unknown."""
        if dtype not in self.flops:
            raise PlanError(
                f"dtype is {dtype!r}; {self.name} has rates for {', '.join(sorted(self.flops))}"
            )
        return self.flops[dtype]


_NVLINK_3 = Link(5e-6, 300e9)
_NVLINK_4 = Link(5e-6, 450e9)
_NVLINK_5 = Link(5e-6, 900e9)
_PCIE_4 = Link(10e-6, 25e9)
_PCIE_5 = Link(10e-6, 50e9)
_NETWORK_200 = Link(10e-6, 25e9)
_NETWORK_400 = Link(10e-6, 50e9)

DEVICES: Mapping[str, DeviceSpec] = {
    device.name: device
    for device in (
        # Data sheet of A40 (product brief PB-10337): 149.7 | 299.4 with sparsity. NVLink joins it
        # to one other GPU only; between pairs it is PCIe 4.0.
        DeviceSpec("A40", {"bf16": 149.7e12, "fp32": 37.4e12}, 696e9, 48 * 10**9,
                   Link(10e-6, 25e9), _NETWORK_200, to_host=_PCIE_4.bandwidth),
        # Data sheet of A100 (r4) and Ampere whitepaper: SXM4; PCIe cards of 80 GB have 1935 GB/s.
        DeviceSpec("A100-40GB", {"bf16": 312e12, "fp32": 19.5e12}, 1555e9, 40 * 10**9,
                   _NVLINK_3, _NETWORK_200, to_host=_PCIE_4.bandwidth),
        DeviceSpec("A100-80GB", {"bf16": 312e12, "fp32": 19.5e12}, 2039e9, 80 * 10**9,
                   _NVLINK_3, _NETWORK_200, to_host=_PCIE_4.bandwidth),
        # Data sheet of H100: SXM5, 1979 with sparsity, 3.35 TB/s; Hopper whitepaper: 989.4, 66.9.
        DeviceSpec("H100", {"bf16": 989.4e12, "fp32": 66.9e12}, 3350e9, 80 * 10**9,
                   _NVLINK_4, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of H200: SXM5, the rates of H100, 4.8 TB/s, 141 GB.
        DeviceSpec("H200", {"bf16": 989.4e12, "fp32": 66.9e12}, 4800e9, 141 * 10**9,
                   _NVLINK_4, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of H100: PCIe, 1513 with sparsity, 2 TB/s. An NVLink bridge joins two of the
        # following cards, or up to four of H200-NVL; between these groups it is PCIe 5.0.
        DeviceSpec("H100-PCIe", {"bf16": 756e12, "fp32": 51e12}, 2000e9, 80 * 10**9,
                   _PCIE_5, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of H100: NVL, one card, 1671 with sparsity, 3.9 TB/s, 94 GB.
        DeviceSpec("H100-NVL", {"bf16": 835e12, "fp32": 60e12}, 3900e9, 94 * 10**9,
                   _PCIE_5, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of H200: NVL, 1671 with sparsity, 4.8 TB/s, 141 GB.
        DeviceSpec("H200-NVL", {"bf16": 835e12, "fp32": 60e12}, 4800e9, 141 * 10**9,
                   _PCIE_5, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # No public data sheet exists; NVIDIA's partners print 148, 44, 4.0 TB/s, 96 GB.
        DeviceSpec("H20", {"bf16": 148e12, "fp32": 44e12}, 4000e9, 96 * 10**9,
                   _NVLINK_4, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of GH200: 1979 with sparsity, 96 GB of HBM3 with 4 TB/s. One GPU per node;
        # NVLink-C2C to the memory of its CPU.
        DeviceSpec("GH200", {"bf16": 989.4e12, "fp32": 66.9e12}, 4000e9, 96 * 10**9,
                   _NETWORK_400, _NETWORK_400, to_host=450e9),
        # Data sheet of HGX B200: a GPU's share of eight.
        DeviceSpec("B200", {"bf16": 2250e12, "fp32": 75e12}, 7700e9, 180 * 10**9,
                   _NVLINK_5, _NETWORK_400, to_host=_PCIE_5.bandwidth),
        # Data sheet of L40S: 362.05 | 733 with sparsity.
        DeviceSpec("L40S", {"bf16": 362e12, "fp32": 91.6e12}, 864e9, 48 * 10**9,
                   _PCIE_4, _NETWORK_200, to_host=_PCIE_4.bandwidth),
        # Data sheet of L4: 242 with sparsity.
        DeviceSpec("L4", {"bf16": 121e12, "fp32": 30.3e12}, 300e9, 24 * 10**9,
                   _PCIE_4, _NETWORK_200, to_host=_PCIE_4.bandwidth),
        # Ada GPU architecture whitepaper, appendix A: bf16 products summed in fp32.
        DeviceSpec("RTX4090", {"bf16": 165.2e12, "fp32": 82.6e12}, 1008e9, 24 * 10**9,
                   _PCIE_4, _NETWORK_200, to_host=_PCIE_4.bandwidth),
        # One core at 3 GHz with two AVX2 units: 32 fp32 FLOPs a cycle from multiply-adds. bf16 has
        # no separate units there and is not faster.
        DeviceSpec("cpu", {"bf16": 96e9, "fp32": 96e9}, 10e9, 4 * 10**9,
                   Link(50e-6, 2e9), Link(100e-6, 1e9), efficiency=0.5),
    )
}


def find_device(name: str) -> DeviceSpec:
    """Return the device with this name, ignoring case, spaces, dashes and underscores; raise
    ``PlanError`` if it is unknown."""
    for device_name, device in DEVICES.items():
        if _plain(device_name) == _plain(name):
            return device
    raise PlanError(f"device is {name!r}; accepted: {', '.join(DEVICES)}")


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c not in " -_")
