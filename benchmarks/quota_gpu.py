"""SM-quota streams on a GPU: does the quota hold, do modules overlap, what does switching cost.

- *throughput*: a bf16 matrix product on 1, 2, 4 ... groups of multiprocessors (SMs) and on the
  whole GPU;
- *placement*: the SMs' own numbers, read by a kernel on each stream of a set, in this process and
  in another one that makes only its own partition;
- *overlap*: two modules on disjoint halves of the GPU, alone and together: spans from events,
  and how much slower they are together;
- *switching*: going from one set to the next with a pool made before, against creating and
  destroying green contexts and streams each time (Mosaic, Fig. 11(b): 0.013 ms against 37 ms).

Needs a CUDA device and a driver of 12.4 or newer; says so where there is none.

    python -m benchmarks.quota_gpu --json
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.table import Table

from benchmarks import _common

SIZE = 8192  # of square matrices
WARM_UP, CALLS = 3, 20
# Work of a module in the overlap part: long against the time it takes to issue it.
MODULE_CALLS = 30
HALVES = {"first": 0.5, "second": 0.5}
STAGES = {"encoders": {"vision": 0.6, "audio": 0.4}, "llm": {"llm": 1.0}}
SWITCHES, CREATIONS = 1000, 10
# Programs of the kernel that reads SM numbers, for each SM of the GPU: all SMs see some.
PROGRAMS_PER_SM = 64
# Of the shorter module's time, what the two must have in common to count as overlapping.
OVERLAP = 0.5
CHILD_SECONDS = 120


def group_counts(groups: int) -> list[int]:
    """1, 2, 4 ... and all groups."""
    found = [1]
    while found[-1] * 2 < groups:
        found.append(found[-1] * 2)
    return found if found[-1] == groups else [*found, groups]


def overlap_share(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Of the shorter span, the part in which both run; spans are (start, end)."""
    common = min(first[1], second[1]) - max(first[0], second[0])
    shorter = min(first[1] - first[0], second[1] - second[0])
    return max(0.0, common) / shorter if shorter > 0 else 0.0


def matrices(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices and nothing running."""
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(size, size, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(2)
    )
    torch.cuda.synchronize()
    return a, b


def milliseconds(stream: torch.cuda.Stream, call: Callable[[], Any], calls: int) -> float:
    """Of one call, of several in a row on a stream."""
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            call()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def throughput(size: int) -> list[dict[str, Any]]:
    """TFLOP/s by multiprocessors granted."""
    from raymm.actors.quota import CudaBackend, StreamPool

    backend = CudaBackend()
    gpu = backend.gpu
    quotas = {
        f"{n} groups": {"m": n * gpu.granularity / gpu.total} for n in group_counts(gpu.groups)
    }
    a, b = matrices(size)
    out = torch.empty_like(a)
    reference = a @ b
    torch.cuda.synchronize()
    rows = []
    with StreamPool(backend, {**quotas, "whole": {"m": 1.0}}) as pool:
        for name, (one,) in pool.partitions.items():
            stream = pool.select(name).streams["m"].torch_stream
            ms = milliseconds(stream, lambda: torch.matmul(a, b, out=out), CALLS)
            error = (out - reference).float().norm() / reference.float().norm()
            rows.append(
                {
                    "set": name,
                    "sms": one.sms,
                    "share": round(one.share, 4),
                    "ms": round(ms, 4),
                    "tflops": round(2 * size**3 / ms / 1e9, 1),
                    "correct": error.item() < 1e-2,
                }
            )
    whole = rows[-1]["tflops"]
    return [{**row, "of_whole": round(row["tflops"] / whole, 4)} for row in rows]


def sm_numbers(stream: torch.cuda.Stream, total: int) -> list[int]:
    """Numbers of the multiprocessors that a kernel on the stream ran on."""
    from benchmarks._sm_number import sm_number_kernel

    programs = PROGRAMS_PER_SM * total
    found = torch.empty(programs, dtype=torch.int32, device="cuda")
    with torch.cuda.stream(stream):
        sm_number_kernel[(programs,)](found, num_warps=4)
    stream.synchronize()
    return sorted(set(found.tolist()))


def numbers_of(modules: Sequence[str] | None) -> dict[str, list[int]]:
    """SM numbers of modules of :data:`HALVES`, from a pool of this process."""
    from raymm.actors.quota import CudaBackend, StreamPool

    backend = CudaBackend()
    with StreamPool(backend, {"halves": HALVES}, modules=modules) as pool:
        streams = pool.select("halves").streams
        return {
            module: sm_numbers(stream.torch_stream, backend.gpu.total)
            for module, stream in streams.items()
        }


def placement() -> dict[str, Any]:
    """Whether partitions are disjoint, also from process to process."""
    here = numbers_of(None)
    code = "import json, sys; from benchmarks import quota_gpu as q; "
    code += "print(json.dumps(q.numbers_of([sys.argv[1]])))"
    found: dict[str, Any] = {
        "sms": {module: len(numbers) for module, numbers in here.items()},
        "disjoint": not set(here["first"]) & set(here["second"]),
    }
    # Processes one after another: at the same time they would only be time-sliced.
    for module in HALVES:
        child = subprocess.run(
            [sys.executable, "-c", code, module],
            cwd=_common.REPOSITORY, capture_output=True, text=True, timeout=CHILD_SECONDS,
        )  # fmt: skip
        if child.returncode:
            return {**found, "same_in_other_processes": None, "why": child.stderr[-500:]}
        there = json.loads(child.stdout.splitlines()[-1])
        found["same_in_other_processes"] = there[module] == here[module] and found.get(
            "same_in_other_processes", True
        )
    return found


def overlap(size: int) -> dict[str, Any]:
    """Two modules on halves of the GPU: spans in milliseconds, alone and together."""
    from raymm.actors.quota import ConcurrentModules, CudaBackend, StreamPool, Work

    a, b = matrices(size)
    outs = {module: torch.empty_like(a) for module in HALVES}

    def module_work(out: torch.Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(MODULE_CALLS):
            torch.matmul(a, b, out=out)
        end.record()
        return start, end

    def run(side: ConcurrentModules, streams: Any, modules: Sequence[str]) -> dict[str, Any]:
        torch.cuda.synchronize()
        base = torch.cuda.Event(enable_timing=True)
        base.record()
        works = {m: Work(module_work, (outs[m],), draws=False) for m in modules}
        events = {m: one.value for m, one in side.run(streams, works).items()}
        torch.cuda.synchronize()
        return {
            m: (round(base.elapsed_time(start), 3), round(base.elapsed_time(end), 3))
            for m, (start, end) in events.items()
        }

    with ConcurrentModules() as side, StreamPool(CudaBackend(), {"halves": HALVES}) as pool:
        streams = pool.select("halves")
        run(side, streams, list(HALVES))  # cuBLAS handles and workspaces of both threads
        alone = {m: run(side, streams, [m])[m] for m in HALVES}
        together = run(side, streams, list(HALVES))
        outs.clear()  # read on streams that end here
    lengths = {m: end - start for m, (start, end) in together.items()}
    return {
        "alone_ms": alone,
        "together_ms": together,
        "overlap": round(overlap_share(*together.values()), 4),
        "slower_together": {m: round(lengths[m] / (alone[m][1] - alone[m][0]), 4) for m in HALVES},
    }


def switching() -> dict[str, Any]:
    """Host milliseconds of going to the next stage, with a pool and without."""
    from cuda.bindings import driver

    from raymm.actors.quota import CudaBackend, StreamPool
    from raymm.actors.quota.green_context import GreenContexts
    from raymm.actors.quota.partition import partition

    with StreamPool(CudaBackend(), STAGES) as pool:
        names = list(STAGES)
        for name in names:
            pool.select(name)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for index in range(SWITCHES):
            pool.select(names[index % len(names)])
        pooled = (time.perf_counter() - start) / SWITCHES
        torch.cuda.synchronize()
    capability = torch.cuda.get_device_capability()[0]
    on_demand = []
    for _ in range(CREATIONS):
        contexts = GreenContexts(driver, torch.cuda.current_device(), capability)
        layout = partition(STAGES["encoders"], contexts.gpu)
        start = time.perf_counter()
        for one in layout:
            contexts.stream(one)
        contexts.close()
        on_demand.append(time.perf_counter() - start)
    pooled_ms, demand_ms = 1e3 * pooled, 1e3 * statistics.median(on_demand)
    return {
        "pool_ms": round(pooled_ms, 5),
        "on_demand_ms": round(demand_ms, 3),
        "times_faster": round(demand_ms / pooled_ms, 1),
    }


def show(rows: Sequence[dict[str, Any]]) -> Table:
    """Throughput by number of multiprocessors."""
    table = Table(title="bf16 matrix product by multiprocessors")
    for column in ("sms", "share", "ms", "tflops", "of_whole", "correct"):
        table.add_column(column)
    for row in rows:
        table.add_row(*(str(row[column.header]) for column in table.columns))
    return table


def main(arguments: list[str] | None = None) -> None:
    parser = _common.parser(__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=SIZE, help="rows of square matrices")
    options = parser.parse_args(arguments)
    console = _common.console()
    if _common.skipped_without_gpu(console, options.json):
        return
    rows = throughput(options.size)
    console.print(show(rows))
    result: dict[str, Any] = {"throughput": rows}
    for name, part in (
        ("placement", placement),
        ("overlap", lambda: overlap(options.size)),
        ("switching", switching),
    ):
        result[name] = part()
        console.print(f"{name}: {result[name]}")
    result["correct"] = all(row["correct"] for row in rows) and result["placement"]["disjoint"]
    result["overlaps"] = result["overlap"]["overlap"] >= OVERLAP
    _common.emit({**result, "machine": _common.machine()}, options.json)
    if not result["correct"]:
        sys.exit("results are wrong or partitions have multiprocessors in common")


if __name__ == "__main__":
    main()
