"""All ways to plan mini-batches, by name."""

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
"""Per name: from (sizes, ranks) and the method's own options to a plan."""


def plan_minibatches(
    sizes: SampleSizes, ranks: int, method: str = "balanced", *, seed: int = 0, epoch: int = 0,
    **options: Any,
) -> MiniBatchPlan:
    """Plan one epoch.

    Args:
        sizes: of all samples.
        ranks: data-parallel ranks.
        method: one of :data:`METHODS`.
        seed, epoch: the same numbers make the same plan on every machine.
        options: of the method.

    Raises:
        PlanError: an unknown method, or what the method raises.
    """
    if method not in METHODS:
        raise PlanError(f"method must be one of {sorted(METHODS)}, got {method!r}")
    return METHODS[method](sizes, ranks, seed=seed, epoch=epoch, **options)
