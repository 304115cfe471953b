"""Section on the machine, and on the rates that the planner's device table expects of it."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch.cuda import nccl

from benchmarks.gpu.device import Device
from benchmarks.gpu.record import Record

PACKAGES = ("torch", "triton", "transformers", "numpy", "numba", "cuda-bindings", "ray", "ortools")
# Number of launches whose host time is averaged.
LAUNCHES = 1000


def run(device: Device, record: Record) -> None:
    """Record names, versions, and rates of matrix products, memory, copies and launches."""
    record.part("device", lambda: describe(device))
    record.part("matrix_product", lambda: matrix_product(device))
    record.part("memory", lambda: memory(device))
    record.part("host_copies", lambda: host_copies(device))
    record.part("launches", lambda: launches(device))


def describe(device: Device) -> Mapping[str, Any]:
    """Return the device's name and properties, and versions."""
    found: dict[str, Any] = {"name": f"trial on {platform.machine()}"}
    if device.is_gpu:
        properties = torch.cuda.get_device_properties(0)
        found = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", 0),
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl.version())),
            "driver": getattr(torch._C, "_cuda_getDriverVersion", lambda: None)(),
        }
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    return {**found, "versions": versions}


def matrix_product(device: Device) -> Mapping[str, Any]:
    """Return TFLOP/s of square products, bf16 and fp32, next to the planner's values."""
    size = device.choose(8192, 64)
    found: dict[str, Any] = {"size": size}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        side = size if name == "bf16" else size // 2
        a, b = (torch.randn(side, side, device=device.torch).to(dtype) for _ in range(2))
        ms = device.milliseconds(lambda a=a, b=b: torch.matmul(a, b))
        found[f"{name}_tflops"] = round(2 * side**3 / ms / 1e9, 1)
    return {**found, "planner": planners_rates(device)}


def planners_rates(device: Device) -> Mapping[str, Any]:
    """Return the rates of this device's entry in the planner's table."""
    from raymm.costs.named_devices import device_called

    entry = device_called(torch.cuda.get_device_name(0) if device.is_gpu else "cpu")
    if entry is None:
        return {"entry": "none"}
    return {
        "entry": entry.name, "gb_per_s": entry.memory_bandwidth / 1e9,
        **{f"{dtype}_tflops": rate / 1e12 for dtype, rate in entry.flops.items()},
        "to_host_gb_per_s": (entry.to_host or 0.0) / 1e9, "efficiency": entry.efficiency,
    }  # fmt: skip


def memory(device: Device) -> Mapping[str, Any]:
    """Return GB/s of a copy within the device, counting bytes read and written."""
    size = device.choose(2 * 2**30, 2**16)
    source = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    target = torch.empty_like(source)
    ms = device.milliseconds(lambda: target.copy_(source))
    return {"gb_per_s": round(2 * size / ms / 1e6, 1)}


def host_copies(device: Device) -> Mapping[str, Any]:
    """Return GB/s between host and device memory, pinned and pageable."""
    size = device.choose(512 * 2**20, 2**16)
    on_device = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    found = {}
    for pinned in (True, False):
        host = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned and device.is_gpu)
        name = "pinned" if pinned else "pageable"
        for way, target, source in (("in", on_device, host), ("out", host, on_device)):
            ms = device.milliseconds(lambda t=target, s=source: t.copy_(s, non_blocking=True))
            found[f"{name}_{way}_gb_per_s"] = round(size / ms / 1e6, 2)
    return found


def launches(device: Device) -> Mapping[str, Any]:
    """Return the host's microseconds for one small operator."""
    x = torch.zeros(16, device=device.torch)
    x.add_(1)
    device.synchronize()
    count = device.choose(LAUNCHES, 10)
    start = time.perf_counter()
    for _ in range(count):
        x.add_(1)
    issued = time.perf_counter() - start
    device.synchronize()
    return {"host_us": round(1e6 * issued / count, 2)}
