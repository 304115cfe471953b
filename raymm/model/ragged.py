"""Items of different sizes in a flat tensor, which has the rows of all items and a size per
item."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from raymm.actors.sharding.vlm.item_rows import rows_per_item, take_items
from raymm.errors import DataError, ModelError

Entries = Mapping[str, torch.Tensor]


def check_rows(name: str, entries: Entries) -> None:
    """Check that rows of items, tensors (N, ...) or (R, ...), add up to the sizes of the N items.
    Raises DataError if they do not."""
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
    """Split a batch into ``count`` microbatches of as many text rows, each with the items of its
    rows.

    Args:
        towers: names of the entries of each tower.
        index: (N,) int64 by tower, the row of each item; without it, one item per row.

    Raises:
        DataError: ``count`` does not divide the rows, or the rows of items do not add up.
    """
    total = len(batch["input_ids"])
    if total % count:
        raise DataError(f"the batch has {total} rows, which is not divisible by {count}")
    size, in_towers = total // count, {entry for entries in towers.values() for entry in entries}
    microbatches: list[dict[str, torch.Tensor]] = []
    for lo in range(0, total, size):
        # Copies, since views would keep the whole batch in memory.
        microbatch = {n: v[lo : lo + size].clone() for n, v in batch.items() if n not in in_towers}
        for name, entries in towers.items():
            tower_inputs = {entry: batch[entry] for entry in entries if entry in batch}
            if tower_inputs:
                rows = index.get(name, torch.arange(total))
                chosen = (rows >= lo) & (rows < lo + size)
                if chosen.any():
                    with _of_batches():
                        microbatch |= take_items(name, tower_inputs, chosen)
        microbatches.append(microbatch)
    return microbatches
