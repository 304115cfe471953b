"""Items of different sizes in one flat tensor: rows of all items, one after another, and for each
item how many are its own.

Legend: ``B`` rows of text, ``N`` items, ``R`` rows of items (patches, frames).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from raymm.model.batch_rules import BatchError

Entries = Mapping[str, torch.Tensor]


def rows_per_item(name: str, entries: Entries, items: int) -> dict[str, torch.Tensor]:
    """Per tensor, how many of its rows are of each item: one, or what the sizes of an item (a row
    of integers, such as a grid of patches, or one number) multiply to.

    Args:
        name: of whose items, for errors.
        entries: tensors (N, ...) or (R, ...).
        items: N.

    Returns:
        By name, (N,) int64.

    Raises:
        BatchError: rows that do not add up.
    """
    sizes = {
        key: value.reshape(items, -1).prod(dim=1) for key, value in entries.items()
        if len(value) == items and value.dim() <= 2 and not value.is_floating_point()
        and value.dtype is not torch.bool
    }  # fmt: skip
    rows = {}
    for key, value in entries.items():
        if len(value) == items:
            rows[key] = torch.ones(items, dtype=torch.int64)
            continue
        fits = [size for size in sizes.values() if int(size.sum()) == len(value)]
        if not fits:
            said = ", ".join(f"{size} says {int(n.sum())}" for size, n in sizes.items())
            raise BatchError(
                f"{key!r} of {name!r} has {len(value)} rows for {items} items "
                f"({said or 'no sizes'}); accepted: a row per item, or as many as the items' sizes "
                "multiply to"
            )
        rows[key] = fits[0].long()
    return rows


def take_items(name: str, entries: Entries, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """Some items, whole, with all of their rows.

    Args:
        name: of whose items, for errors.
        entries: tensors (N, ...) or (R, ...).
        own: (N,) bool, which.

    Raises:
        BatchError: rows that do not add up.
    """
    rows = rows_per_item(name, entries, len(own))
    return {
        key: value[torch.repeat_interleave(own, rows[key])] for key, value in entries.items()
    }


def split_rows(
    batch: Mapping[str, Any], towers: Mapping[str, tuple[str, ...]],
    index: Mapping[str, torch.Tensor], count: int,
) -> list[dict[str, torch.Tensor]]:  # fmt: skip
    """A batch in microbatches of equally many rows of text, each with the items of its rows.

    Args:
        batch: what a model's forward takes, and labels.
        towers: by tower, names of the entries that are its.
        index: by tower, (N,) int64, the row of each item; without, an item per row.
        count: of microbatches.

    Raises:
        BatchError: rows that do not divide, or do not add up.
    """
    total = len(batch["input_ids"])
    if total % count:
        raise BatchError(f"the batch has {total} rows, which do not divide into {count}")
    size, taken = total // count, {entry for entries in towers.values() for entry in entries}
    parts: list[dict[str, torch.Tensor]] = []
    for lo in range(0, total, size):
        # Copies: views would bring the whole batch along.
        part = {n: v[lo : lo + size].clone() for n, v in batch.items() if n not in taken}
        for name, entries in towers.items():
            own = {entry: batch[entry] for entry in entries if entry in batch}
            if own:
                rows = index.get(name, torch.arange(total))
                chosen = (rows >= lo) & (rows < lo + size)
                if chosen.any():
                    part |= take_items(name, own, chosen)
        parts.append(part)
    return parts
