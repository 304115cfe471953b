"""Batches in memory, cut into microbatches as the actors read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.data import MicrobatchMeta, describe
from raymm.model import text_inputs


class BatchError(ValueError):
    """A batch that does not fit the plan."""


def describe_microbatches(
    microbatches: Sequence[Mapping[str, Any]], encoders: Sequence[str]
) -> tuple[list[dict[str, Any]], list[MicrobatchMeta]]:
    """Complete microbatches (:func:`raymm.model.complete_microbatch`) as parts per reader, with
    their metadata."""
    meta = [
        describe(one, [str(row) for row in range(one["input_ids"].shape[0])])
        for one in microbatches
    ]
    parts = []
    for one in microbatches:
        part = {name: one[name] for name in encoders if name in one}
        parts.append({**part, "text": text_inputs(one)})
    return parts, meta


def split_batch(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split a batch by rows into ``count`` microbatches of equal size.

    Raises:
        BatchError: if rows do not divide.
    """
    rows = batch["input_ids"].shape[0]
    if rows % count:
        raise BatchError(
            f"the batch has {rows} rows, which do not divide into num_microbatches={count}"
        )
    size = rows // count
    microbatches = []
    for start in range(0, rows, size):
        part: dict[str, Any] = {}
        for name, value in batch.items():
            if value is None:
                continue
            if not isinstance(value, Mapping):
                part[name] = value[start : start + size]
                continue
            tensors = {k: v for k, v in value.items() if k != "sample_index"}
            items = next(iter(tensors.values())).shape[0]
            index = torch.as_tensor(value.get("sample_index", torch.arange(items)))
            chosen = (index >= start) & (index < start + size)
            if chosen.any():
                part[name] = {k: v[chosen] for k, v in tensors.items()}
                part[name]["sample_index"] = index[chosen] - start
        microbatches.append(part)
    return microbatches
