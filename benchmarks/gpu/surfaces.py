"""Section on quota surfaces of real modules: an iteration's time by quota, alone and colocated."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import LARGE, TINY, VISION, Sizes, build_model, microbatches, plan_of
from benchmarks.gpu.record import Record
from raymm.actors.executor.colocation import default_backend
from raymm.actors.quota import RecordingBackend
from raymm.actors.rank.module_profiler import ProfileRequest
from raymm.actors.rank.surface_profiler import (
    WHOLE,
    ColocationProfiler,
    SurfaceProfiler,
    SurfaceRequest,
)
from raymm.layout.stage_builders import stage_builders
from raymm.model.batch_rules import text_inputs
from raymm.model.model import LANGUAGE_MODEL
from raymm.scheduler.plan.stage import StageId

QUOTAS = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, WHOLE)
GROUPS = ({VISION: 0.25, LANGUAGE_MODEL: 0.75}, {VISION: 0.5, LANGUAGE_MODEL: 0.5})
REPEATS = 5


def run(device: Device, record: Record) -> None:
    """Measure a surface per module, then groups of both."""
    sizes = device.choose(LARGE, TINY)
    found: dict[str, dict[float, float]] = {}
    arguments, requests = arguments_of(device, sizes), requests_of(device, sizes)
    for name in (VISION, LANGUAGE_MODEL):
        record.part(f"{name} by quota", partial(surface, device, name, arguments, requests, found))
    for group in GROUPS:
        label = ", ".join(f"{name} {quota}" for name, quota in group.items())
        record.part(label, partial(colocation, device, group, arguments, requests, found))


def arguments_of(device: Device, sizes: Sizes) -> dict[str, tuple[Any, ...]]:
    """Return the constructor arguments of profilers, by module."""
    model = build_model(sizes)
    builders = stage_builders(model, plan_of(device, model, sizes)).build
    reloadable = model.reloadable()
    return {
        name: (builders[StageId(name, 0)], device.kind, "bfloat16", name in reloadable, 1)
        for name in (VISION, LANGUAGE_MODEL)
    }


def requests_of(device: Device, sizes: Sizes) -> dict[str, SurfaceRequest]:
    """Return a request for one microbatch, by module."""
    batch = microbatches(sizes)[0]
    images = (sizes.rows, sizes.image_tokens, sizes.llm["hidden_size"])
    quotas = device.choose(QUOTAS, (0.5, WHOLE))
    return {
        VISION: SurfaceRequest(ProfileRequest(batch[VISION], {}), False, quotas),
        LANGUAGE_MODEL: SurfaceRequest(
            ProfileRequest(text_inputs(batch), {VISION: images}), True, quotas
        ),
    }


def surface(
    device: Device, name: str, arguments: Mapping[str, tuple[Any, ...]],
    requests: Mapping[str, SurfaceRequest], found: dict[str, dict[float, float]],
) -> Mapping[str, Any]:  # fmt: skip
    """Return milliseconds by quota, and relative speed over quota.

    The relative speed is that of the whole device times the quota: 1 if a module is as fast as its
    share of multiprocessors.
    """
    backend = default_backend(device.torch)
    profiler = SurfaceProfiler(*arguments[name])
    times = profiler.surface(requests[name], device.choose(REPEATS, 1), backend)
    del profiler
    device.release()
    found[name] = times.seconds
    whole = times.seconds[WHOLE]
    return {
        "ms": {f"{q:g}": round(1e3 * s, 3) for q, s in times.seconds.items()},
        "speed_over_quota": {f"{q:g}": round(whole / s / q, 3) for q, s in times.seconds.items()},
    }


def colocation(
    device: Device, group: Mapping[str, float], arguments: Mapping[str, tuple[Any, ...]],
    requests: Mapping[str, SurfaceRequest], found: Mapping[str, Mapping[float, float]],
) -> Mapping[str, Any]:  # fmt: skip
    """Return milliseconds of both modules' iterations, alone and colocated, and the speedup.

    The speedup is the time of both in turn on the whole device over their concurrent time.
    """
    backend = RecordingBackend() if not device.is_gpu else None
    expected = {name: found.get(name, {}).get(quota, 0.1) for name, quota in group.items()}
    profiler = ColocationProfiler(arguments)
    (times,) = profiler.colocated_times(requests, [group], [expected], backend)
    del profiler
    device.release()
    together = max(t.colocated for t in times.values())
    in_turn = sum(found.get(name, {}).get(WHOLE, float("nan")) for name in group)
    return {
        "alone_ms": {name: round(1e3 * t.alone, 3) for name, t in times.items()},
        "beside_ms": {name: round(1e3 * t.colocated, 3) for name, t in times.items()},
        "slower_beside": {name: round(t.colocated / t.alone, 3) for name, t in times.items()},
        "in_turn_over_together": round(in_turn / together, 3),
    }
