"""A microbatch of a whole model: what it must be, and which of its modules gets what of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raymm.actors.sharding.sample_rows import shares
from raymm.actors.sharding.whole.token_share import packed_tokens
from raymm.actors.stages.whole_language import language_inputs
from raymm.errors import DataError
from raymm.model.batch_rules import IDS, LABELS, check_tensor
from raymm.model.module_kind import LANGUAGE_MODEL
from raymm.model.ragged import check_rows

Batch = Mapping[str, torch.Tensor]
# By tower, for each argument of its call which entry of a batch it is.
TowerInputs = Mapping[str, Mapping[str, str]]
# What data workers call the language model's part of a microbatch.
TEXT = "text"


def whole_parts(towers: TowerInputs, microbatch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    """What the first stage of each module is given, of those that have anything to do.

    Args:
        towers: of the model.
        microbatch: what its forward takes, and labels.
    """
    inputs_of = {
        tower: {name: microbatch[entry] for name, entry in own.items() if entry in microbatch}
        for tower, own in towers.items()
    }  # fmt: skip
    there = {tower: inputs for tower, inputs in inputs_of.items() if inputs}
    entries = {
        tower: {entry: microbatch[entry] for entry in towers[tower].values() if entry in microbatch}
        for tower in there
    }  # fmt: skip
    taken = {entry for own in towers.values() for entry in own.values()}
    text = {name: value for name, value in microbatch.items() if name not in taken}
    return {**there, LANGUAGE_MODEL: language_inputs(text, entries)}


def text_parts(towers: TowerInputs, microbatch: Batch) -> dict[str, dict[str, torch.Tensor]]:
    """:func:`whole_parts` under the names that data workers have for them."""
    parts = whole_parts(towers, microbatch)
    return {TEXT if name == LANGUAGE_MODEL else name: own for name, own in parts.items()}


@dataclass(frozen=True)
class TextShares:
    """How processes share the text of a microbatch.

    Attributes:
        tokens: processes that share the tokens of every row, ``cp``.
        rows: processes that share rows, ``fsdp``.
        packing: whether a process's rows are put together as one.
    """

    tokens: int = 1
    rows: int = 1
    packing: bool = False

    def check(self, microbatch: Batch) -> None:
        """
        Raises:
            DataError: a process would have no token.
        """
        shape, real = tuple(microbatch[IDS].shape), microbatch.get("attention_mask")
        for own in shares(shape[0], self.rows) if self.tokens > 1 else ():
            tokens = shape[1]
            if self.packing:
                tokens = len(packed_tokens((shape[0], tokens), real, own or range(1)))
            if tokens < self.tokens:
                raise DataError(
                    f"rows of {IDS} have {tokens} tokens{' together' * self.packing}, fewer than "
                    f"the {self.tokens} processes of cp; accepted: at least {self.tokens}"
                )


@dataclass(frozen=True)
class WholeBatchCheck:
    """Looks whether a model can take a microbatch, without it.

    Attributes:
        towers: of the model.
        kinds: of every entry of its example, dtype and dimensions.
        sized: towers the sizes of whose items say how many rows they have, in the example.
        shares: how processes share the text.
    """

    towers: TowerInputs
    kinds: Mapping[str, tuple[torch.dtype, int]]
    sized: frozenset[str]
    shares: TextShares = TextShares()

    @classmethod
    def of(cls, towers: TowerInputs, example: Batch) -> WholeBatchCheck:
        """
        Args:
            towers: of the model.
            example: that it was tried with.
        """
        kinds = {name: (value.dtype, value.dim()) for name, value in example.items()}
        sized = frozenset(name for name in towers if _adds_up(name, towers, example))
        return cls(towers, kinds, sized)

    def __call__(self, microbatch: Any) -> None:
        """
        Raises:
            DataError: it is not what the model's forward takes.
        """
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
        self.shares.check(microbatch)
        for tower in self.sized:
            if own := _entries(tower, self.towers, microbatch):
                check_rows(tower, own)


def _entries(tower: str, towers: TowerInputs, batch: Batch) -> dict[str, torch.Tensor]:
    return {entry: batch[entry] for entry in towers[tower].values() if entry in batch}


def _adds_up(tower: str, towers: TowerInputs, example: Batch) -> bool:
    """Whether sizes of items, in the example, say how many rows an item has."""
    shown = _entries(tower, towers, example)
    try:
        check_rows(tower, shown)
    except DataError:
        return False  # they say something else
    return True
