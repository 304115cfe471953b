"""Section on a rank's step: parity with the CPU, time, host waits, and peak memory.

Time and peak memory are measured in bf16 and compared with the plan.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from benchmarks.gpu import host_waits
from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import (
    LARGE,
    TINY,
    OneRank,
    build_model,
    microbatches,
    plan_of,
    step_inputs,
)
from benchmarks.gpu.record import Record
from raymm.scheduler.schedule.memory import rank_memory
from raymm.scheduler.schedule.network import Network
from raymm.scheduler.search.evaluation import step_timeline

WARM_UP_STEPS, STEPS = 2, 5
# Relative differences between devices: other summation order and other attention kernels.
FP32_BOUND, BF16_BOUND = 1e-4, 3e-2


def run(device: Device, record: Record) -> None:
    """Check parity in both precisions, then run steps that train all modules or only the projector.
    """
    for name, autocast, bound in (
        ("fp32 as on the CPU", None, FP32_BOUND),
        ("bf16 as fp32 on the CPU", "bfloat16", BF16_BOUND),
    ):
        record.part(name, partial(parity, device, autocast, bound))
    for name, frozen in (("bf16 all trained", False), ("bf16 projector trained", True)):
        record.part(name, partial(measure, device, frozen), needs=device.choose(12.0, 0.0))


def parity(device: Device, autocast: str | None, bound: float) -> Mapping[str, Any]:
    """Return relative errors of two steps' losses and gradient norms against fp32 on the CPU.

    Raises:
        AssertionError: they differ by more than ``bound``.
    """
    found = {}
    for kind, dtype in (("cpu", None), (device.kind, autocast)):
        model = build_model(TINY)
        inputs = step_inputs(microbatches(TINY))
        rank = OneRank(model, plan_of(device, model, TINY), kind, dtype, *inputs)
        results = [rank.step() for _ in range(2)]
        rank.close()
        numbers = [(sum(r.losses.values()), r.grad_norm or 0.0) for r in results]
        found[len(found)] = torch.tensor(numbers, dtype=torch.float64)
    relative = ((found[1] - found[0]) / found[0]).abs()
    if not relative.max() <= bound:  # also fails for NaN
        raise AssertionError(f"{relative.tolist()} of {found[0].tolist()}, at most {bound}")
    loss, norm = relative.amax(0).tolist()
    return {"loss": f"{loss:.1e}", "gradient_norm": f"{norm:.1e}", "bound": bound}


def measure(device: Device, frozen: bool) -> Mapping[str, Any]:
    """Measure steps in bf16, after a warm-up."""
    sizes = device.choose(LARGE, TINY)
    model = build_model(sizes, frozen)
    plan = plan_of(device, model, sizes)
    rank = OneRank(model, plan, device.kind, "bfloat16", *step_inputs(microbatches(sizes)))
    try:
        return _steps(device, rank, sizes.rows * sizes.tokens * sizes.microbatches)
    finally:
        rank.close()


def _steps(device: Device, rank: OneRank, tokens: int) -> Mapping[str, Any]:
    times, peaks = [], []
    for number in range(WARM_UP_STEPS + device.choose(STEPS, 1)):
        device.synchronize()
        start = time.perf_counter()
        result = rank.step()
        device.synchronize()
        if number >= WARM_UP_STEPS:
            times.append(time.perf_counter() - start)
            peaks.append(result.peak_bytes)
    with host_waits.counted(device) as waits:
        rank.step()
    seconds = statistics.median(times)
    (need,) = rank_memory(rank.plan, rank.program)
    planned = step_timeline(rank.plan, Network()).makespan
    return {
        "step_s": round(seconds, 4),
        "planned_s": round(planned, 4),
        "tokens_per_s": round(tokens / seconds),
        "host_waits": sum(waits.values()),
        "peak_gb": round(max(peaks) / 1e9, 3),
        "planned_gb": round(need.total / 1e9, 3),
        "peak_over_plan": round(max(peaks) / need.total, 4),
        "parameters": sum(rank.parameters.values()),
        "planned_state_gb": round(need.state / 1e9, 3),
        "planned_activations_gb": round(need.activations / 1e9, 3),
        "waits_by_place": [f"{count} {where}" for where, count in waits.most_common()],
        "step_times_s": [round(each, 4) for each in times],
    }
