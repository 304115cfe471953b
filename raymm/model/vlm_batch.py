"""Microbatches of a whole model: their checks, and their split by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.sharding.sample_rows import row_shares
from raymm.actors.sharding.vlm.item_rows import rows_per_item, take_items
from raymm.actors.sharding.vlm.token_share import packed_tokens
from raymm.actors.stages.vlm_language import language_inputs
from raymm.errors import DataError, ModelError
from raymm.model.batch_rules import IDS, LABELS, BatchCheck, check_tensor

Batch = Mapping[str, torch.Tensor]
# Entry of a batch by tower and argument of its call.
TowerInputs = Mapping[str, Mapping[str, str]]
# Name that data workers use for the language model's part of a microbatch.
TEXT = "text"
Entries = Mapping[str, torch.Tensor]


def vlm_parts(
    towers: TowerInputs, microbatch: Batch, text: str = TEXT
) -> dict[str, dict[str, torch.Tensor]]:
    """Return the inputs of the first stage of each module, without modules that have no items.
    ``text`` names those of the language model."""
    inputs_of = {
        tower: {name: microbatch[entry] for name, entry in arguments.items() if entry in microbatch}
        for tower, arguments in towers.items()
    }  # fmt: skip
    present = {tower: inputs for tower, inputs in inputs_of.items() if inputs}
    entries = {
        tower: {entry: microbatch[entry] for entry in towers[tower].values() if entry in microbatch}
        for tower in present
    }  # fmt: skip
    tower_entries = {entry for arguments in towers.values() for entry in arguments.values()}
    text_entries = {name: value for name, value in microbatch.items() if name not in tower_entries}
    return {**present, text: language_inputs(text_entries, entries)}


@dataclass(frozen=True)
class TextShares:
    """Numbers of processes that split the text of a microbatch.

    Attributes:
        tokens: processes that split the tokens of every row, ``cp``.
        rows: processes that split rows, ``fsdp``.
        packing: True if a process packs its rows into one.
        together: number of adjacent rows that stay on one process.
    """

    tokens: int = 1
    rows: int = 1
    packing: bool = False
    together: int = 1

    def check(self, microbatch: Batch) -> None:
        """Raise a DataError if a process would get no token."""
        shape, real = tuple(microbatch[IDS].shape), microbatch.get("attention_mask")
        together = self.together if shape[0] % self.together == 0 else 1
        for rows in row_shares(shape[0], self.rows, together) if self.tokens > 1 else ():
            tokens = shape[1]
            if self.packing:
                tokens = len(packed_tokens((shape[0], tokens), real, rows or range(1)))
            if tokens < self.tokens:
                raise DataError(
                    f"rows of {IDS} have {tokens} tokens{' together' * self.packing}, fewer than "
                    f"the {self.tokens} processes of cp; accepted: at least {self.tokens}"
                )


@dataclass(frozen=True)
class VlmBatchCheck(BatchCheck):
    """Check that a whole model accepts a microbatch, without the model.

    Attributes:
        kinds: dtype and number of dimensions by entry of the example.
        sized: towers whose item sizes add up to the rows of items in the example.
    """

    towers: TowerInputs
    kinds: Mapping[str, tuple[torch.dtype, int]]
    sized: frozenset[str]
    shares: TextShares = TextShares()

    @classmethod
    def of(cls, towers: TowerInputs, example: Batch) -> VlmBatchCheck:
        """Return the check for a model that was probed with ``example``."""
        kinds = {name: (value.dtype, value.dim()) for name, value in example.items()}
        sized = frozenset(name for name in towers if _adds_up(name, towers, example))
        return cls(towers, kinds, sized)

    def complete(self, microbatch: Any) -> dict[str, Any]:
        if not isinstance(microbatch, Mapping):
            raise DataError("a microbatch is not a dict; accepted: the processor's output")
        accepted = "an int64 tensor (rows, tokens)"
        ids = check_tensor(IDS, microbatch.get(IDS), accepted)
        labels = check_tensor(LABELS, microbatch.get(LABELS), accepted)
        for name, value in ((IDS, ids), (LABELS, labels)):
            if value.dtype != torch.int64 or value.dim() != 2 or value.shape != ids.shape:
                raise DataError(f"{name} is of shape {tuple(value.shape)}; accepted: {accepted}")
        for name, value in microbatch.items():
            check_tensor(name, value, "a tensor")
            if name == LABELS:
                continue
            if name not in self.kinds:
                raise DataError(
                    f"the batch has {name!r}, which the example does not have; accepted: "
                    f"{', '.join((LABELS, *self.kinds))}"
                )
            if (value.dtype, value.dim()) != self.kinds[name]:
                dtype, dimensions = self.kinds[name]
                raise DataError(
                    f"{name} is of dtype {value.dtype} and {value.dim()} dimensions; accepted: "
                    f"{dtype} and {dimensions}, as in the example"
                )
        return dict(microbatch)

    def attempt(self, microbatch: Batch) -> None:
        self.shares.check(microbatch)
        self._check_items(microbatch)

    def split(self, batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Split a batch by ``sample_index``, the row of every item by tower, (N,) int64; it is
        required unless there is one item per row."""
        index = batch.get("sample_index", {})
        entries = self.complete({n: value for n, value in batch.items() if n != "sample_index"})
        self._check_items(entries)
        towers = {name: tuple(arguments.values()) for name, arguments in self.towers.items()}
        return split_rows(entries, towers, index, count)

    def _check_items(self, microbatch: Batch) -> None:
        """Raise a DataError if sizes of items do not add up to the rows of items."""
        for tower in self.sized:
            if entries := _entries(tower, self.towers, microbatch):
                check_rows(tower, entries)


def _entries(tower: str, towers: TowerInputs, batch: Batch) -> dict[str, torch.Tensor]:
    return {entry: batch[entry] for entry in towers[tower].values() if entry in batch}


def _adds_up(tower: str, towers: TowerInputs, example: Batch) -> bool:
    """Return True if the sizes of items in the example are their numbers of rows."""
    shown = _entries(tower, towers, example)
    try:
        check_rows(tower, shown)
    except DataError:
        return False  # the sizes have another meaning
    return True


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
