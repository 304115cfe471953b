"""Section on NCCL with one rank: every collective of raymm, host blocking, and FSDP2.

Uses gloo on a CPU. A rank cannot send to itself: messages need two GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.gpu.record import Record

TIMEOUT = timedelta(seconds=20)
ELEMENTS = 1 << 20
# Seconds for which the stream is busy before an asynchronous operation.
BUSY_S = 0.2


def run(device: Device, record: Record) -> None:
    """Run start, operations, waits, and a step under FSDP2."""
    record.part("start", partial(start, device))
    if not dist.is_initialized():
        return  # the recorded error has the reason
    for name, call in operations(device).items():
        record.part(name, partial(operation, device, call))
    record.part("waits", partial(waits, device))
    record.part("FSDP2", partial(fully_sharded, device))
    dist.destroy_process_group()


def start(device: Device) -> Mapping[str, Any]:
    """Return seconds of the first process group, with eager creation of its communicator."""
    store = dist.HashStore()
    begin = time.perf_counter()
    dist.init_process_group(
        device.choose("nccl", "gloo"), store=store, rank=0, world_size=1, timeout=TIMEOUT,
        device_id=torch.device("cuda", 0) if device.is_gpu else None,
    )  # fmt: skip
    made = time.perf_counter() - begin
    x = torch.ones(1, device=device.torch)
    dist.all_reduce(x)
    device.synchronize()
    return {"init_s": round(made, 3), "first_operation_s": round(time.perf_counter() - begin, 3)}


def operations(device: Device) -> dict[str, Callable[[], torch.Tensor]]:
    """Return operations by name; with one rank each returns the data that it sent."""
    x = torch.arange(device.choose(ELEMENTS, 64), device=device.torch, dtype=torch.float32)

    def in_place(call: Callable[..., Any], **options: Any) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = x.clone()
            call(y, **options)
            return y

        return run

    def gathered(call: Callable[..., Any]) -> Callable[[], torch.Tensor]:
        def run() -> torch.Tensor:
            y = torch.empty_like(x)
            call(y, x)
            return y

        return run

    return {
        "all_reduce": in_place(dist.all_reduce),
        "all_reduce max": in_place(dist.all_reduce, op=dist.ReduceOp.MAX),
        "broadcast": in_place(dist.broadcast, src=0),
        "all_gather_into_tensor": gathered(dist.all_gather_into_tensor),
        "reduce_scatter_tensor": gathered(dist.reduce_scatter_tensor),
        "all_to_all_single": gathered(dist.all_to_all_single),
    }


def operation(device: Device, call: Callable[[], torch.Tensor]) -> Mapping[str, Any]:
    """Return microseconds of an operation of 4 MB.

    Raises:
        AssertionError: received and sent data differ.
    """
    received = call()
    device.synchronize()
    expected = torch.arange(len(received), device=device.torch, dtype=torch.float32)
    assert torch.equal(received, expected), "another value was received than sent"
    return {"us": round(1e3 * device.milliseconds(call), 1)}


def waits(device: Device) -> Mapping[str, Any]:
    """Return milliseconds for which the host blocks on an operation that cannot start yet.

    The stream is busy before the operation.
    """
    x = torch.ones(1024, device=device.torch)

    def blocked(wait: Callable[[Any], Any]) -> float:
        device.synchronize()
        device.busy(BUSY_S)
        work = dist.all_reduce(x, async_op=True)
        begin = time.perf_counter()
        wait(work)
        seconds = time.perf_counter() - begin
        device.synchronize()
        return round(1e3 * seconds, 2)

    device.synchronize()
    begin = time.perf_counter()
    device.busy(BUSY_S)
    device.synchronize()
    return {
        "stream_busy_ms": round(1e3 * (time.perf_counter() - begin), 1),
        "wait_ms": blocked(lambda work: work.wait()),
        "wait_with_timeout_ms": blocked(lambda work: work.wait(TIMEOUT)),
        "is_completed_ms": blocked(lambda work: work.is_completed()),
    }


def fully_sharded(device: Device) -> Mapping[str, Any]:
    """Run a step of a module under torch's FSDP2 on the one rank, in bf16, and a plain one.

    Raises:
        AssertionError: losses differ by more than bf16's rounding.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    width = device.choose(1024, 16)

    def step(sharded: bool) -> float:
        torch.manual_seed(0)
        net = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        net = net.to(device.torch)
        if sharded:
            mesh = init_device_mesh(device.kind, (1,))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
            for layer in net:
                fully_shard(layer, mesh=mesh, mp_policy=policy)
            fully_shard(net, mesh=mesh, mp_policy=policy)
        loss = net(torch.ones(8, width, device=device.torch)).float().square().mean()
        loss.backward()
        return loss.item()

    plain, sharded = step(False), step(True)
    off = abs(plain - sharded) / abs(plain)
    assert off <= 2e-2, f"loss {sharded} under FSDP2, {plain} without"
    return {"loss_off": f"{off:.1e}"}
