"""Section on a rank with cut and renewed connections, and on modules within quotas.

Both run through the rank actor, as in a training run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.gpu.device import Device
from benchmarks.gpu.one_rank import (
    LARGE,
    TINY,
    VISION,
    OneRank,
    Sizes,
    build_model,
    microbatches,
    plan_of,
    step_inputs,
)
from benchmarks.gpu.record import Record
from raymm.actors.quota import RecordingBackend
from raymm.errors import ChannelError
from raymm.model.model import LANGUAGE_MODEL

STEPS = 2
# Relative difference of losses and gradient norms between two runs of the same steps.
BOUND = 1e-4
# Fewer blocks and a smaller vocabulary: the model is irrelevant here.
SMALL = replace(LARGE, llm=LARGE.llm | {"num_hidden_layers": 2, "vocab_size": 8000})
QUOTAS = {VISION: 0.25, LANGUAGE_MODEL: 0.75}


def run(device: Device, record: Record) -> None:
    """Run steps without a failure, then both parts."""
    sizes = device.choose(SMALL, TINY)
    undisturbed: list[tuple[float, float]] = []
    record.part("undisturbed", partial(undisturbed_steps, device, sizes, undisturbed))
    record.part("cut and renew", partial(cut_and_renew, device, sizes, undisturbed))
    record.part("quotas", partial(quotas, device, sizes, undisturbed))


def make_rank(device: Device, sizes: Sizes, shares: Mapping[str, float] | None = None) -> OneRank:
    """Build a rank of the model; with ``shares`` its modules run concurrently within quotas."""
    model = build_model(sizes)
    plan = plan_of(device, model, sizes)
    options: dict[str, Any] = {}
    if shares is not None:
        stages = tuple(replace(each, quota=shares[each.id.module]) for each in plan.stages)
        plan = replace(plan, stages=stages)
        options = {} if device.is_gpu else {"quota_backend": RecordingBackend}
    inputs = step_inputs(microbatches(sizes))
    return OneRank(model, plan, device.kind, "bfloat16", *inputs, **options)


def timed_step(device: Device, rank: OneRank) -> tuple[tuple[float, float], float]:
    """Return loss and gradient norm of a step, and its seconds."""
    device.synchronize()
    start = time.perf_counter()
    result = rank.step()
    device.synchronize()
    seconds = time.perf_counter() - start
    return (sum(result.losses.values()), result.grad_norm or 0.0), seconds


def compare(numbers: list[tuple[float, float]], expected: list[tuple[float, float]]) -> float:
    """Return the largest relative difference.

    Raises:
        AssertionError: it is above :data:`BOUND`.
    """
    assert len(numbers) == len(expected), "steps without a failure did not end"
    off = max(
        abs(a - b) / abs(b)
        for row, due in zip(numbers, expected, strict=True)
        for a, b in zip(row, due, strict=True)
    )
    assert off <= BOUND, f"{numbers}, without a failure {expected}"
    return off


def undisturbed_steps(
    device: Device, sizes: Sizes, found: list[tuple[float, float]]
) -> Mapping[str, Any]:
    """Return seconds of undisturbed steps of a rank."""
    rank = make_rank(device, sizes)
    times = []
    for _ in range(STEPS):
        numbers, seconds = timed_step(device, rank)
        found.append(numbers)
        times.append(seconds)
    rank.close()
    return {"step_s": round(times[-1], 4), "loss": found[-1][0]}


def cut_and_renew(
    device: Device, sizes: Sizes, expected: list[tuple[float, float]]
) -> Mapping[str, Any]:
    """Return seconds of each part of a recovery.

    A step, a cut, a failing step, leaving, reconnecting, and a step with the numbers of a rank that
    was not cut.

    Raises:
        AssertionError: the step after the cut does not fail, or the last one has other numbers.
    """
    rank = make_rank(device, sizes)
    actor = rank.actor
    numbers = [timed_step(device, rank)[0]]
    seconds: dict[str, float] = {}

    def timed(name: str, call: Any) -> None:
        start = time.perf_counter()
        call()
        device.synchronize()
        seconds[f"{name}_s"] = round(time.perf_counter() - start, 4)

    timed("cut", partial(actor.cut, 0))
    try:
        rank.step()
    except ChannelError:
        pass
    else:
        raise AssertionError("a step of a rank whose connections are cut did not fail")
    timed("leave", actor.leave)
    timed("renew", partial(actor.renew, {}, 1))
    rank.load_program()
    rank.rewind(1)
    last, seconds["step_s"] = timed_step(device, rank)
    off = compare([*numbers, last], expected)
    rank.close()
    return {**seconds, "numbers_off": f"{off:.1e}"}


def quotas(
    device: Device, sizes: Sizes, expected: list[tuple[float, float]]
) -> Mapping[str, Any]:
    """Return seconds of a step in which both modules have a share of the device, and the grants.

    Raises:
        AssertionError: its numbers differ from those of a step without quotas.
    """
    rank = make_rank(device, sizes, QUOTAS)
    steps = [timed_step(device, rank) for _ in range(STEPS)]
    off = compare([numbers for numbers, _ in steps], expected)
    granted = rank.actor.quotas()
    rank.close()
    return {
        "step_s": round(steps[-1][1], 4),
        "numbers_off": f"{off:.1e}",
        "granted": granted.splitlines(),
    }
