"""Blocks that make activations again or have them fetched: time and bytes of every option, and
whether steps have the same numbers."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import LARGE, TINY, OneRank, Sizes, build_model, microbatches, plan_of
from benchmarks.gpu.record import Record
from benchmarks.gpu.surfaces import arguments_of, requests_of
from raymm.actors.rank.module_profiler import ModuleProfiler
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.scheduler.costs.recomputation import KEEP, OFFLOAD, OPTIONS
from raymm.scheduler.schedule.memory import rank_memory

REPEATS = 3
WARM_UP_STEPS, STEPS = 1, 3
# Fewer blocks and words: a model is built for every option.
MEDIUM = replace(LARGE, llm=LARGE.llm | {"num_hidden_layers": 4, "vocab_size": 8000})


def run(device: Device, record: Record) -> None:
    """Steps with every option, the first keeping all, then blocks by themselves."""
    sizes = device.choose(MEDIUM, TINY)
    kept: dict[str, tuple[float, float]] = {}
    for option in device.choose((KEEP, *(n for n in OPTIONS if n != KEEP)), (KEEP, OFFLOAD)):
        record.part(f"steps, {option}", partial(steps, device, sizes, option, kept))
    record.part("blocks", partial(blocks, device, sizes), needs=device.choose(8.0, 0.0))


def steps(
    device: Device, sizes: Sizes, option: str, kept: dict[str, tuple[float, float]]
) -> Mapping[str, Any]:
    """Seconds and peak of a step in which all blocks of the language model do the same.

    Raises:
        AssertionError: numbers are not those of a step that keeps everything.
    """
    model = build_model(sizes)
    plan = plan_of(device, model, sizes)
    options = () if option == KEEP else (option,) * sizes.llm["num_hidden_layers"]
    plan = replace(plan, stages=tuple(
        replace(stage, layer_options=options) if stage.id.module == LANGUAGE_MODEL else stage
        for stage in plan.stages
    ))  # fmt: skip
    rank = OneRank(model, plan, device.kind, "bfloat16", microbatches(sizes))
    numbers, times, peaks = [], [], []
    for _ in range(WARM_UP_STEPS + device.choose(STEPS, 1)):
        device.synchronize()
        start = time.perf_counter()
        result = rank.step()
        device.synchronize()
        times.append(time.perf_counter() - start)
        peaks.append(result.peak_bytes)
        numbers.append((sum(result.losses.values()), result.grad_norm))
    (need,) = rank_memory(plan, rank.program)
    rank.close()
    del rank
    gc.collect()
    device.release()
    first = kept.setdefault(KEEP, numbers[0])
    # The first step: from the second on, differences in the last bits have been trained on.
    off = max(abs(a - b) / abs(b) for a, b in zip(numbers[0], first, strict=True))
    assert off <= 1e-5, f"loss and gradient norm are {numbers[0]}, where all is kept {first}"
    return {
        "step_s": round(statistics.median(times[WARM_UP_STEPS:]), 4),
        "peak_gb": round(max(peaks) / 1e9, 3),
        "planned_gb": round(need.total / 1e9, 3),
        "peak_over_plan": round(max(peaks) / need.total, 4),
        "numbers_off": off,
    }


def blocks(device: Device, sizes: Sizes) -> Mapping[str, Any]:
    """Of one block of the language model: milliseconds of its forward, both halves of its backward
    and what options add to them, and the megabytes that it holds, measured and as planned."""
    model = build_model(sizes)
    planned = plan_of(device, model, sizes).profile
    assert planned is not None
    expected = planned.modules[LANGUAGE_MODEL][1]
    profiler = ModuleProfiler(*arguments_of(device, sizes)[LANGUAGE_MODEL])
    request = requests_of(device, sizes)[LANGUAGE_MODEL].request
    layer = profiler.measure(request, device.choose(REPEATS, 1)).layers[1]
    found: dict[str, Any] = {
        "forward_ms": round(1e3 * layer.forward, 3),
        "planned_forward_ms": round(1e3 * expected.forward, 3),
        "backward_input_ms": round(1e3 * layer.backward_input, 3),
        "planned_backward_input_ms": round(1e3 * expected.backward_input, 3),
        "backward_weight_ms": round(1e3 * layer.backward_weight, 3),
        "planned_backward_weight_ms": round(1e3 * expected.backward_weight, 3),
        "kept_mb": round(layer.activation_bytes / 1e6, 1),
        "planned_kept_mb": round(expected.activation_bytes / 1e6, 1),
    }
    for key, options in (("options", layer.options), ("planned_options", expected.options)):
        found[key] = {
            o.name: f"+{1e3 * o.seconds:.3f} ms {o.nbytes / 1e6:.1f} MB" for o in options
        }
    return found
