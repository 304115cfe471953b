"""Section on SM-quota streams: disjointness, order, concurrency and cost.

- *granted*: the driver's split of the GPU, and the contexts made of it;
- *throughput*: a bf16 matrix product on 1, 2, 4 ... groups of multiprocessors (SMs) and on the
  whole GPU;
- *placement*: SM numbers, read by a kernel on each stream of a set, in this process and in other
  processes that create only their own partition;
- *event order*: a stream reads another stream's output, after its event and, to show that the check
  can fail, before it;
- *overlap*: two modules on disjoint halves of the GPU, alone and together, compared with the whole
  GPU for one after the other;
- *numbers*: modules that train concurrently have the results of one after another;
- *host waits*: none, from stage to stage;
- *switching*: changing from one set to the next with an existing pool, compared with creating and
  destroying green contexts and streams each time (Mosaic, Fig. 11(b): 0.013 ms against 37 ms);
- *destruction*: destroyed pools leave no memory allocated.

Needs cuda-python and a driver of 12.4 or newer, and reports if they are missing. On a CPU an
accounting backend replaces the driver.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu import host_waits
from benchmarks.gpu.device import Device, relative_error
from benchmarks.gpu.host_waits import REPOSITORY
from benchmarks.gpu.record import Record
from raymm.actors.executor.colocation import default_backend
from raymm.actors.quota import Backend, ConcurrentModules, QuotaStream, StreamPool, StreamSet, Work

SIZE = 8192  # side of square matrices
# Work of a module in the overlap part: long compared with the time to issue it.
MODULE_CALLS = 30
HALVES = {"first": 0.5, "second": 0.5}
STAGES = {"encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0}}
SWITCHES, CREATIONS = 1000, 10
# Programs of the kernel that reads SM numbers, per SM of the GPU: every SM runs some.
PROGRAMS_PER_SM = 64
CHILD_SECONDS = 40
# Seconds for which a stream is busy before it writes the value that another reads.
LATE_S = 0.02
TRAINED_STEPS = 5
POOLS = 4


def run(device: Device, record: Record) -> None:
    """Run all parts."""
    for name, call in (
        ("granted", granted), ("event order", event_order), ("placement", placement),
        ("overlap", overlap), ("numbers", numbers), ("host waits", waits),
        ("throughput", throughput), ("switching", switching), ("destruction", destruction),
        ("placement in other processes", other_processes),
    ):  # fmt: skip
        record.part(name, partial(call, device))


def backend_of(device: Device) -> Backend:
    """Return the green-context backend, or the accounting one."""
    return default_backend(device.torch)


def group_counts(groups: int) -> list[int]:
    """Return 1, 2, 4 ... and all groups."""
    found = [1]
    while found[-1] * 2 < groups:
        found.append(found[-1] * 2)
    return found if found[-1] == groups else [*found, groups]


def overlap_share(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return the share of the shorter span in which both run; spans are (start, end)."""
    common = min(first[1], second[1]) - max(first[0], second[0])
    shorter = min(first[1] - first[0], second[1] - second[0])
    return max(0.0, common) / shorter if shorter > 0 else 0.0


def matrices(device: Device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two square matrices once all work is done."""
    size = device.choose(SIZE, 32)
    a, b = (torch.randn(size, size, device=device.torch).bfloat16() for _ in range(2))
    device.synchronize()
    return a, b


def granted(device: Device) -> Mapping[str, Any]:
    """Return the driver's grants, and contexts of 1, 2, 4 ... groups.

    The driver's own count of their multiprocessors is compared with raymm's at creation.
    """
    backend = backend_of(device)
    gpu = backend.gpu
    sets = {
        str(n): {"m": n * gpu.granularity / gpu.total} for n in group_counts(gpu.groups)
    }
    with StreamPool(backend, sets) as pool:
        sms = [layout[0].sms for layout in pool.partitions.values()]
    return {
        "total": gpu.total, "granularity": gpu.granularity, "groups": gpu.groups,
        "smallest_quota": round(gpu.smallest_quota, 4), "contexts": str(sms),
    }  # fmt: skip


def throughput(device: Device) -> Mapping[str, Any]:
    """Return TFLOP/s of a matrix product by granted multiprocessors.

    Raises:
        AssertionError: a product on a part of the GPU differs from that on the whole GPU.
    """
    backend = backend_of(device)
    gpu = backend.gpu
    quotas = {f"{n}": {"m": n * gpu.granularity / gpu.total} for n in group_counts(gpu.groups)}
    a, b = matrices(device)
    out = torch.empty_like(a)
    reference = a @ b
    device.synchronize()
    rates: dict[str, float] = {}
    with StreamPool(backend, {**quotas, "whole": {"m": 1.0}}) as pool:
        for name, (part,) in pool.partitions.items():
            with pool.select(name).streams["m"].use():
                ms = device.milliseconds(partial(torch.matmul, a, b, out=out))
            device.synchronize()
            error = relative_error(out, reference)
            assert error < 1e-2, f"a product on {part} is {error:.3g} of the norm off"
            rates[f"{part.sms} SMs"] = round(2 * len(a) ** 3 / ms / 1e9, 1)
        del out, reference
    return {"tflops": rates}


def sm_numbers(device: Device, stream: QuotaStream, total: int) -> list[int]:
    """Return the SM numbers that a kernel on the stream ran on.

    On a CPU these are the numbers that the stream's groups represent.
    """
    if not device.is_gpu:
        size = stream.partition.sms // stream.partition.groups
        first = stream.partition.first_group * size
        return list(range(first, first + stream.partition.sms))
    from benchmarks.gpu.sm_number import sm_number_kernel

    programs = PROGRAMS_PER_SM * total
    found = torch.empty(programs, dtype=torch.int32, device=device.torch)
    device.synchronize()
    with stream.use():
        sm_number_kernel[(programs,)](found, num_warps=4)
    device.synchronize()
    return sorted(set(found.tolist()))


def numbers_of(kind: str, modules: Sequence[str] | None = None) -> dict[str, list[int]]:
    """Return SM numbers of modules of :data:`HALVES`, from a pool of this process."""
    device = Device(kind)
    backend = backend_of(device)
    with StreamPool(backend, {"halves": HALVES}, modules=modules) as pool:
        streams = pool.select("halves").streams
        return {
            module: sm_numbers(device, stream, backend.gpu.total)
            for module, stream in streams.items()
        }


def placement(device: Device) -> Mapping[str, Any]:
    """Check that partitions are disjoint and as large as granted.

    Raises:
        AssertionError: they are not.
    """
    found = numbers_of(device.kind)
    first, second = (set(found[module]) for module in HALVES)
    gpu = backend_of(device).gpu
    assert not first & second, f"both have multiprocessors {sorted(first & second)}"
    return {
        "first": len(first), "second": len(second), "unused": gpu.total - len(first | second),
        "numbers": {module: str(numbers)[:200] for module, numbers in found.items()},
    }


def other_processes(device: Device) -> Mapping[str, Any]:
    """Check that a process that creates only its own partition gets the same multiprocessors.

    Raises:
        RuntimeError: a process failed.
    """
    own = numbers_of(device.kind)
    code = "import json, sys; from benchmarks.gpu import green_contexts as g; "
    code += "print(json.dumps(g.numbers_of(sys.argv[1], [sys.argv[2]])))"
    same = {}
    # One process after another: concurrent processes would be time-sliced.
    for module in device.choose(list(HALVES), ["second"]):
        child = subprocess.run(
            [sys.executable, "-c", code, device.kind, module],
            cwd=REPOSITORY, capture_output=True, text=True, timeout=CHILD_SECONDS,
        )  # fmt: skip
        if child.returncode:
            raise RuntimeError(f"{module}: {child.stderr[-800:]}")
        same[module] = json.loads(child.stdout.splitlines()[-1])[module] == own[module]
    return {"same": same}


def event_order(device: Device) -> Mapping[str, Any]:
    """Check that a stream sees the write of another green context after its event.

    A stream that does not wait sees the previous value.

    Raises:
        AssertionError: an event does not order the two streams in one of its uses.
    """
    with StreamPool(backend_of(device), {"halves": HALVES}) as pool:
        streams = pool.select("halves")
        first, second = streams.streams.values()
        current = streams.backend.current()

        def seen(writer: Any, reader: Any, waits: bool) -> float:
            x = torch.zeros(1, device=device.torch)
            device.synchronize()
            with writer.use():
                device.busy(LATE_S)
                x.fill_(1.0)
                event = writer.record()
            with reader.use():
                if waits:
                    reader.wait(event)
                y = x.clone()
            device.synchronize()
            return y.item()

        x = torch.zeros(1, device=device.torch)
        device.synchronize()
        with first.use():
            device.busy(LATE_S)
            x.fill_(1.0)
            event = first.record()
        current.wait(event)
        on_current = x.clone()
        device.synchronize()
        found = {
            "first_to_second": seen(first, second, True),
            "second_to_first": seen(second, first, True),
            "first_to_current": on_current.item(),
        }
        without = seen(first, second, False)
        del x, on_current
    assert set(found.values()) == {1.0}, f"events do not order streams: {found}"
    return {**found, "without_waiting": without, "the_check_can_fail": without == 0.0}


def overlap(device: Device) -> Mapping[str, Any]:
    """Return milliseconds of two modules on halves of the GPU, alone and together.

    Also on the whole GPU, one after the other.
    """
    a, b = matrices(device)
    sets = {"halves": HALVES, "whole": {"first": 1.0}}
    outs = {module: torch.empty_like(a) for module in HALVES}
    calls = device.choose(MODULE_CALLS, 2)

    def module_work(out: torch.Tensor) -> tuple[Any, Any]:
        start, end = device.event(), device.event()
        start.record()
        for _ in range(calls):
            torch.matmul(a, b, out=out)
        end.record()
        return start, end

    def spans(
        side: ConcurrentModules, streams: StreamSet, modules: Sequence[str]
    ) -> dict[str, tuple[float, float]]:
        device.synchronize()
        origin = device.event()
        origin.record()
        works = {m: Work(module_work, (outs[m],), draws=False) for m in modules}
        events = {m: output.value for m, output in side.run(streams, works).items()}
        device.synchronize()
        return {
            m: (origin.elapsed_time(start), origin.elapsed_time(end))
            for m, (start, end) in events.items()
        }

    with ConcurrentModules() as side, StreamPool(backend_of(device), sets) as pool:
        halves = pool.select("halves")
        spans(side, halves, list(HALVES))  # create cuBLAS handles and workspaces of both threads
        alone = {m: spans(side, halves, [m])[m] for m in HALVES}
        together = spans(side, halves, list(HALVES))
        whole = spans(side, pool.select("whole"), ["first"])["first"]
        outs.clear()  # read on streams that end here
    lengths = {m: end - start for m, (start, end) in together.items()}
    both = max(end for _, end in together.values()) - min(start for start, _ in together.values())
    in_turn = 2 * (whole[1] - whole[0])
    return {
        "alone_ms": {m: round(end - start, 3) for m, (start, end) in alone.items()},
        "together_ms": round(both, 3),
        "in_turn_on_all_ms": round(in_turn, 3),
        "in_turn_over_together": round(in_turn / both, 4),
        "overlap": round(overlap_share(*together.values()), 4),
        "slower_together": {
            m: round(lengths[m] / (alone[m][1] - alone[m][0]), 4) for m in HALVES
        },
    }


def numbers(device: Device) -> Mapping[str, Any]:
    """Check that concurrently trained modules have bitwise the results of one after another.

    Raises:
        AssertionError: they do not.
    """
    width = device.choose(512, 8)

    def train(at_once: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        nets = {
            m: nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device.torch)
            for m in HALVES
        }
        optimizer = torch.optim.SGD([p for net in nets.values() for p in net.parameters()], 0.1)
        with ConcurrentModules() as side, StreamPool(backend_of(device), {"s": HALVES}) as pool:
            streams = pool.select("s")
            for step in range(TRAINED_STEPS):
                x = torch.full((64, width), 0.1 * step, device=device.torch)
                forwards = {m: Work(net, (x,), draws=False) for m, net in nets.items()}
                outs = _run(side, streams, forwards, at_once)
                backwards = {
                    m: Work(lambda y: y.square().mean().backward(), (out,), draws=False,
                            backward_of=out)
                    for m, out in outs.items()
                }  # fmt: skip
                for out in _run(side, streams, backwards, at_once).values():
                    out.get()
                optimizer.step()
                optimizer.zero_grad()
            device.synchronize()
            found = [p.detach().clone() for net in nets.values() for p in net.parameters()]
            device.synchronize()
            # Release all tensors that these streams used before the streams themselves.
            del out, outs, x, forwards, backwards, nets, optimizer
        return found

    pairs = list(zip(train(True), train(False), strict=True))
    assert all(torch.equal(first, second) for first, second in pairs), (
        f"at most {max(relative_error(a, b) for a, b in pairs):.3g} of the norm off"
    )
    return {"tensors": len(pairs), "equal": True}


def _run(
    side: ConcurrentModules, streams: StreamSet, works: Mapping[str, Work], at_once: bool
) -> dict[str, Any]:
    if at_once:
        return side.run(streams, works)
    return {m: side.run(streams, {m: work})[m] for m, work in works.items()}


def waits(device: Device) -> Mapping[str, Any]:
    """Count the host's waits while stages are switched and work is issued.

    Raises:
        AssertionError: results differ from those of the work in order.
    """
    x = torch.ones(64, 64, device=device.torch)
    with ConcurrentModules() as side, StreamPool(backend_of(device), STAGES) as pool:
        for _ in range(2):  # the first time creates handles
            with host_waits.counted(device) as found:
                encoders = side.run(pool.select("encoders"), {
                    m: Work(lambda x: x @ x, (x,), draws=False) for m in STAGES["encoders"]
                })  # fmt: skip
                last = side.run(pool.select("llm"), {
                    "llm": Work(lambda a, b: a + b, tuple(encoders.values()), draws=False)
                })  # fmt: skip
                total = last["llm"].get()
        assert total.eq(128).all()
        del x, encoders, last, total  # read on streams that end here
    return {"host_waits": sum(found.values()), "places": dict(found)}


def switching(device: Device) -> Mapping[str, Any]:
    """Return host milliseconds of switching to the next stage, with a pool and without."""
    switches = device.choose(SWITCHES, 10)
    with StreamPool(backend_of(device), STAGES) as pool:
        names = list(STAGES)
        for name in names:
            pool.select(name)
        device.synchronize()
        start = time.perf_counter()
        for index in range(switches):
            pool.select(names[index % len(names)])
        pooled = (time.perf_counter() - start) / switches
        device.synchronize()
    on_demand = []
    for _ in range(device.choose(CREATIONS, 1)):
        backend = backend_of(device)
        start = time.perf_counter()
        with StreamPool(backend, {"encoders": STAGES["encoders"]}):
            pass
        on_demand.append(time.perf_counter() - start)
    pooled_ms, demand_ms = 1e3 * pooled, 1e3 * statistics.median(on_demand)
    return {
        "pool_ms": round(pooled_ms, 5),
        "on_demand_ms": round(demand_ms, 3),
        "times_faster": round(demand_ms / pooled_ms, 1),
    }


def destruction(device: Device) -> Mapping[str, Any]:
    """Return used bytes of the GPU after pools were created and destroyed, by their number."""
    taken = []
    a, b = matrices(device)
    for _ in range(POOLS):
        with StreamPool(backend_of(device), {"halves": HALVES}) as pool:
            for stream in pool.select("halves").streams.values():
                with stream.use():
                    out = a @ b
            device.synchronize()
            del out
        taken.append(device.used_bytes())
    return {"taken_mb": str([round(size / 1e6) for size in taken]),
            "grown_mb": round((taken[-1] - taken[0]) / 1e6, 1)}  # fmt: skip
