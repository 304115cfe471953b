"""Equality of a step's microbatches, and load balance of module replicas.

Computed from a step's metadata (``MicrobatchMeta``) and measured timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raymm.data import ItemTokens, MicrobatchMeta
from raymm.scheduler.minibatch.metrics import dist_ratio
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.timeline import Timeline

TEXT = "text"


def microbatch_loads(
    meta: Sequence[MicrobatchMeta], modalities: Sequence[str], packed: bool,
    tokens: Mapping[str, ItemTokens] | None = None,
) -> np.ndarray:
    """Return loads, (microbatches, modalities + 1) int64.

    Encoder columns count input elements. The last column counts tokens of the language model,
    including padding.

    Args:
        modalities: names, in the order of the columns; text is the last column.
        packed: True if rows are packed into one sequence instead of padded to the longest.
        tokens: number of tokens that items of a modality put before the text.
    """
    loads = np.zeros((len(meta), len(modalities) + 1), np.int64)
    for row, microbatch in enumerate(meta):
        lengths = np.array(microbatch.lengths, np.int64)
        for column, name in enumerate(modalities):
            shapes = microbatch.shapes.get(name, {})
            loads[row, column] = sum(
                int(np.prod(shape)) for key, shape in shapes.items() if key != "sample_index"
            )
            prepended = (tokens or {}).get(name, ItemTokens()).prepended
            owners = np.array(microbatch.items.get(name, ()), np.int64)
            lengths += prepended * np.bincount(owners, minlength=len(lengths))
        loads[row, -1] = lengths.sum() if packed else lengths.max(initial=0) * len(lengths)
    return loads


def step_balance(
    meta: Sequence[MicrobatchMeta], modalities: Sequence[str], packed: bool,
    tokens: Mapping[str, ItemTokens] | None, plan: Plan, timeline: Timeline,
) -> dict[str, Any]:
    """Return a step's entries for ``metrics.jsonl``. The best ``dist_ratio`` is 0; the others' best
    is 1.

    Args:
        tokens: tokens of an item by modality; None if unknown.

    Returns:
        ``microbatches``: their number; ``dist_ratio``: per modality and ``"text"``, the mean gap of
        microbatches to the largest (OmniBal, eq. 2); ``efficiency``: mean cost of a microbatch over
        the largest, if every modality costs the same over the step; ``measured``: the same for the
        seconds that ranks computed; ``copies``: per module with replicas, mean seconds of its
        replicas over the largest.
    """
    copies = {
        name: mean_over_max(_replicas_busy(plan, name, timeline))
        for name in dict.fromkeys(stage.module for stage in plan.stages)
        if len(plan.replicas(name)) > 1
    }
    return {**batch_balance(meta, modalities, packed, tokens, timeline), "copies": copies}


def batch_balance(
    meta: Sequence[MicrobatchMeta], modalities: Sequence[str], packed: bool,
    tokens: Mapping[str, ItemTokens] | None, timeline: Timeline,
) -> dict[str, Any]:
    """Return :func:`step_balance` without ``copies``."""
    loads = microbatch_loads(meta, modalities, packed, tokens)
    totals = loads.sum(0)
    cost = (loads / np.where(totals > 0, totals, 1)).sum(1)
    names = (*modalities, TEXT)
    return {
        "microbatches": len(meta),
        "dist_ratio": {
            name: round(dist_ratio(loads[None, :, column]), 4) for column, name in enumerate(names)
        },
        "efficiency": mean_over_max(cost),
        "measured": mean_over_max(_busy(timeline, range(len(meta)))),
    }


def _busy(timeline: Timeline, microbatches: Iterable[int]) -> list[float]:
    """Return seconds of compute per microbatch, over all ranks."""
    seconds = dict.fromkeys(microbatches, 0.0)
    for span in timeline.compute():
        if span.microbatch in seconds:
            seconds[span.microbatch] += span.end - span.start
    return list(seconds.values())


def _replicas_busy(plan: Plan, module: str, timeline: Timeline) -> list[float]:
    stage_busy = timeline.stage_busy()
    return [
        sum(stage_busy.get(stage.id, 0.0) for stage in replica) for replica in plan.replicas(module)
    ]


def mean_over_max(values: Sequence[float] | np.ndarray) -> float:
    """Return mean over maximum: 1 if all values are equal."""
    return round(1.0 - dist_ratio(np.asarray(values, np.float64)[None, :]), 4)
