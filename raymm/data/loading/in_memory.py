"""Microbatches that are in memory: splitting of batches, and conversion to the form that ranks
read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.data.loading.object_store import StoredTensors
from raymm.data.samples.collate import MicrobatchMeta, describe
from raymm.errors import DataError
from raymm.model.batch_rules import IDS, INDEX, text_inputs


def split_batch(batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    """Split a batch by rows into ``count`` microbatches of equal size. Raise a ``DataError`` if
    rows are not divisible by ``count``, or a tensor does not have the items in dimension 0."""
    rows = len(batch[IDS])
    if rows % count:
        raise DataError(
            f"the batch has {rows} rows, which is not divisible by num_microbatches={count}"
        )
    size = rows // count
    return [_rows_of(batch, start, start + size) for start in range(0, rows, size)]


def _rows_of(batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for name, value in batch.items():
        if not isinstance(value, Mapping):
            rows[name] = value[start:stop]
            continue
        check_split(name, value, "to split a batch")
        index = value[INDEX]
        chosen = (index >= start) & (index < stop)
        if chosen.any():
            rows[name] = {key: tensor[chosen] for key, tensor in value.items()}
            rows[name][INDEX] = index[chosen] - start
    return rows


def check_split(name: str, items: Mapping[str, torch.Tensor], purpose: str) -> None:
    """Raise a ``DataError`` if a tensor does not have the items of modality ``name`` in dimension
    0. ``purpose`` is the reason for splitting the items."""
    count = len(items[INDEX])
    for key, tensor in items.items():
        if len(tensor) != count:
            raise DataError(
                f"{key!r} of {name!r} has shape {tuple(tensor.shape)} for {count} items; accepted "
                f"{purpose}: items along the first dimension of every tensor"
            )


def items_by_row(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a microbatch whose items are in the order of their rows, so that the items of
    consecutive samples are contiguous."""
    items: dict[str, Any] = {}
    for name, value in microbatch.items():
        if not isinstance(value, Mapping):
            items[name] = value
            continue
        order = torch.argsort(value[INDEX], stable=True)
        in_order = torch.equal(order, torch.arange(len(order)))
        items[name] = value if in_order else {key: tensor[order] for key, tensor in value.items()}
    return items


def describe_microbatches(
    microbatches: Sequence[Mapping[str, Any]], encoders: Sequence[str]
) -> tuple[list[dict[str, Any]], list[MicrobatchMeta]]:
    """Return complete microbatches (:func:`raymm.model.batch_rules.complete_microbatch`) split into
    the parts of each reader, and their metadata."""
    meta = [
        describe(dict(microbatch), [str(row) for row in range(microbatch["input_ids"].shape[0])])
        for microbatch in microbatches
    ]
    stored_inputs = []
    for microbatch in microbatches:
        # The storage format of torch cannot be read back for all dtypes (uint16, float8).
        stored = {name: StoredTensors(microbatch[name]) for name in encoders if name in microbatch}
        stored_inputs.append({**stored, "text": text_inputs(microbatch)})
    return stored_inputs, meta
