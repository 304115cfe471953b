"""Methods that plan mini-batches, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from raymm.errors import PlanError
from raymm.scheduler.minibatch.balanced import plan_balanced
from raymm.scheduler.minibatch.fixed_size import plan_length_grouped, plan_random
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes

METHODS: dict[str, Callable[..., MiniBatchPlan]] = {
    "balanced": plan_balanced,
    "length_grouped": plan_length_grouped,
    "random": plan_random,
}
"""Functions of (sizes, ranks) and further options that return a plan, by name."""


def plan_minibatches(
    sizes: SampleSizes, ranks: int, method: str = "balanced", *, seed: int = 0, epoch: int = 0,
    **options: Any,
) -> MiniBatchPlan:
    """Plan one epoch with one of :data:`METHODS` and its further ``options``; equal ``seed`` and
    ``epoch`` give equal plans on every machine. Raise ``PlanError`` for an unknown method, or
    invalid arguments of the method."""
    if method not in METHODS:
        raise PlanError(f"method must be one of {sorted(METHODS)}, got {method!r}")
    return METHODS[method](sizes, ranks, seed=seed, epoch=epoch, **options)
