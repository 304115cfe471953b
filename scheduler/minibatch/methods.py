"""Methods that plan mini-batches, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from raymm.errors import PlanError
from raymm.scheduler.minibatch.balanced import plan_balanced
from raymm.scheduler.minibatch.problem import MiniBatchPlan, SampleSizes, checked, generator

# As in transformers' LengthGroupedSampler: number of steps whose samples are sorted together.
MEGABATCHES = 50


def plan_random(
    sizes: SampleSizes, ranks: int, batch: int = 4, *,
    sharded: bool = False, seed: int = 0, epoch: int = 0,
) -> MiniBatchPlan:
    """Plan a random permutation, cut into groups of ``batch`` samples. An incomplete last step is
    dropped, as with ``drop_last`` of samplers. If ``sharded``, every rank shuffles a contiguous
    part of the data, as in Megatron-LM's ``MegatronPretrainingRandomSampler``. Raise ``PlanError``
    for fewer samples than one step needs, or a batch below 1."""
    random = generator(seed, epoch)
    if sharded:
        bucket = len(sizes) // max(ranks * batch, 1) * batch
        shards = np.arange(bucket * ranks).reshape(ranks, -1, max(batch, 1))
        shards = np.stack([random.permutation(s.ravel()).reshape(s.shape) for s in shards], 1)
        order = np.concatenate([shards.ravel(), np.arange(bucket * ranks, len(sizes))])
    else:
        order = random.permutation(len(sizes))
    return _fixed("random", order, sizes, ranks, batch, seed, epoch)


def plan_length_grouped(
    sizes: SampleSizes, ranks: int, batch: int = 4, *,
    modality: str | None = None, seed: int = 0, epoch: int = 0,
) -> MiniBatchPlan:
    """Group samples of similar length, as transformers' ``LengthGroupedSampler``: a random
    permutation, sorted within megabatches of 50 steps (fewer if there are not 4 of them), with the
    longest sample in the first step. The length is that of ``modality``, by default the last one.
    Raise ``PlanError`` for fewer samples than one step needs, a batch below 1, or an unknown
    modality."""
    length = sizes.values[:, sizes.column(modality or sizes.names[-1])]
    step = max(ranks, 1) * max(batch, 1)
    order = generator(seed, epoch).permutation(len(sizes))
    mega = step * max(1, min(len(sizes) // (step * 4), MEGABATCHES))
    chunks = [order[start : start + mega] for start in range(0, len(order), mega)]
    chunks = [chunk[np.argsort(-length[chunk], kind="stable")] for chunk in chunks]
    if chunks:
        longest = max(range(len(chunks)), key=lambda i: length[chunks[i][0]])
        chunks[0][0], chunks[longest][0] = chunks[longest][0], chunks[0][0]
        order = np.concatenate(chunks)
    return _fixed("length_grouped", order, sizes, ranks, batch, seed, epoch)


def _fixed(
    method: str, order: np.ndarray, sizes: SampleSizes, ranks: int, batch: int, seed: int,
    epoch: int,
) -> MiniBatchPlan:
    checked(sizes, ranks)
    if batch < 1:
        raise PlanError(f"batch must be at least 1, got {batch}")
    steps = len(order) // (ranks * batch)
    if not steps:
        raise PlanError(
            f"{len(order)} samples are fewer than {ranks} ranks with {batch} each"
        )
    planned = steps * ranks * batch
    return MiniBatchPlan(
        method=method, ranks=ranks, samples=order[:planned],
        offsets=np.arange(0, planned + 1, batch), left_out=np.sort(order[planned:]),
        packed=False, budgets=None, seed=seed, epoch=epoch,
    )


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
