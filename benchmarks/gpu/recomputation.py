"""Section on recomputed and offloaded activations: time and bytes, and equal numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import (
    LARGE,
    OPTIMIZER,
    TINY,
    OneRank,
    Sizes,
    build_model,
    microbatches,
    plan_of,
    step_inputs,
)
from benchmarks.gpu.record import Record
from benchmarks.gpu.surfaces import arguments_of, requests_of
from raymm.actors.modules.blocks import block_list, find_blocks
from raymm.actors.rank.module_profiler import ModuleProfiler
from raymm.actors.recompute.recomputed_layers import layers_recomputed
from raymm.model.model import LANGUAGE_MODEL
from raymm.scheduler.costs.recomputation import KEEP, OFFLOAD, OPTIONS
from raymm.scheduler.schedule.memory import rank_memory

REPEATS = 3
WARM_UP_STEPS, STEPS = 1, 3
# Fewer blocks and a smaller vocabulary, so that every option runs its steps in time.
MEDIUM = replace(LARGE, llm=LARGE.llm | {"num_hidden_layers": 4, "vocab_size": 8000})


def run(device: Device, record: Record) -> None:
    """Run steps of one model with every option, the first keeping all, then single blocks."""
    sizes = device.choose(MEDIUM, TINY)
    model = build_model(sizes)
    # The learning rate is zero, so that every step has the numbers of the first.
    rank = OneRank(
        model, plan_of(device, model, sizes), device.kind, "bfloat16",
        *step_inputs(microbatches(sizes)), optimizer=replace(OPTIMIZER, lr=0.0),
    )  # fmt: skip
    kept: list[tuple[float, float]] = []
    for option in device.choose((KEEP, *(n for n in OPTIONS if n != KEEP)), (KEEP, OFFLOAD)):
        record.part(f"steps, {option}", partial(steps, device, rank, option, kept))
    rank.close()
    record.part("blocks", partial(blocks, device, sizes), needs=device.choose(8.0, 0.0))


def steps(
    device: Device, rank: OneRank, option: str, kept: list[tuple[float, float]]
) -> Mapping[str, Any]:
    """Return seconds and peak of a step in which all language model blocks use one option.

    Raises:
        AssertionError: numbers differ from those of a step that keeps everything.
    """
    (stage,) = (s for s in rank.plan.stages if s.id.module == LANGUAGE_MODEL)
    module = rank.actor._stages[stage.id].module
    path = find_blocks(module)
    assert path is not None
    layers = list(block_list(module, path))
    options = (option,) * len(layers)
    plan = replace(rank.plan, stages=tuple(
        replace(each, layer_options=options) if each is stage and option != KEEP else each
        for each in rank.plan.stages
    ))  # fmt: skip
    numbers, times, peaks = [], [], []
    with layers_recomputed(layers, options):
        for _ in range(WARM_UP_STEPS + device.choose(STEPS, 1)):
            device.synchronize()
            start = time.perf_counter()
            result = rank.step()
            device.synchronize()
            times.append(time.perf_counter() - start)
            peaks.append(result.peak_bytes)
            numbers.append((sum(result.losses.values()), result.grad_norm or 0.0))
    (need,) = rank_memory(plan, rank.program)
    device.release()
    kept[:] = kept or numbers[:1]
    off = max(
        abs(a - b) / abs(b) for row in numbers for a, b in zip(row, kept[0], strict=True)
    )  # fmt: skip
    assert off <= 1e-5, f"loss and gradient norm are {numbers}, where all is kept {kept[0]}"
    return {
        "step_s": round(statistics.median(times[WARM_UP_STEPS:]), 4),
        "peak_gb": round(max(peaks) / 1e9, 3),
        "planned_gb": round(need.total / 1e9, 3),
        "peak_over_plan": round(max(peaks) / need.total, 4),
        "numbers_off": off,
    }


def blocks(device: Device, sizes: Sizes) -> Mapping[str, Any]:
    """Measure one block of the language model.

    Milliseconds of its forward, of both halves of its backward and of the options, and the
    megabytes that it holds, measured and planned.
    """
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
