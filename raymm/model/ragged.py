"""Items of different sizes in one flat tensor: rows of all items, one after another, and for each
item how many are its own.

Legend: ``B`` rows of text, ``N`` items, ``R`` rows of items (patches, frames).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raymm.actors.sharding.whole.item_rows import rows_per_item, take_items
from raymm.errors import DataError, ModelError

Entries = Mapping[str, torch.Tensor]


def check_rows(name: str, entries: Entries) -> None:
    """
    Args:
        name: of whose items, for errors.
        entries: tensors (N, ...) or (R, ...).

    Raises:
        DataError: rows of items that do not add up to what their sizes say.
    """
    with _of_batches():
        rows_per_item(name, entries, min(map(len, entries.values())))


@contextmanager
def _of_batches() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise DataError(str(error)) from None


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
        DataError: rows that do not divide, or do not add up.
    """
    total = len(batch["input_ids"])
    if total % count:
        raise DataError(f"the batch has {total} rows, which do not divide into {count}")
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
                    with _of_batches():
                        part |= take_items(name, own, chosen)
        parts.append(part)
    return parts
