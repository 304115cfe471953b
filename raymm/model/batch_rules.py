"""Rules for a microbatch, for all execution styles and for the reference in one process.

Only equivalent input is converted: boolean masks, and padding on the left, which is moved right.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from raymm.actors.modules.blocks import input_embeddings, method_of
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.stages.labels import label_mask
from raymm.errors import DataError

IDS, LABELS, MASK, INDEX = "input_ids", "labels", "attention_mask", "sample_index"
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class Vocabulary(NamedTuple):
    """Numbers of ids that a language model reads and predicts."""

    ids: int
    labels: int

    @classmethod
    def of(cls, module: nn.Module) -> Vocabulary:
        """Return the vocabulary of a language model or its skeleton."""
        ids = len(input_embeddings(module).weight)
        head = method_of(module, "get_output_embeddings")()
        return cls(ids, ids if head is None else len(head.weight))


class BatchCheck(ABC):
    """Check of a model's batches before they are sent to a process.

    A rank that cannot use a batch ends, and all other ranks with it. The driver checks batches in
    memory; data workers check samples of data on disk one by one.

    Attributes:
        labelled: True if a step needs a label.
    """

    labelled = True

    @abstractmethod
    def complete(self, microbatch: Any) -> dict[str, Any]:
        """Return a microbatch with all entries that modules read. Raises DataError if an entry is
        not accepted."""

    @abstractmethod
    def attempt(self, microbatch: Mapping[str, Any]) -> None:
        """Raise a DataError if the modules would refuse a complete microbatch."""

    @abstractmethod
    def split(self, batch: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
        """Split a batch into ``count`` complete microbatches of equal size."""

    def __call__(self, microbatch: Any) -> None:
        """Raise a DataError if the model does not accept a microbatch, which may have no label."""
        self.attempt(self.complete(microbatch))

    def microbatches(
        self, batch: Any, count: int, most: int | None = None
    ) -> list[dict[str, Any]]:
        """Return the complete microbatches of a step.

        Args:
            batch: one batch, which is split into ``count`` microbatches by rows, or a list of
                microbatches.
            most: maximum number of microbatches in a list; None for any.

        Raises:
            DataError: the batch does not fit the model, or the step has no label.
        """
        if isinstance(batch, Mapping):
            microbatches = self.split(batch, count)
        elif isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch):
            if most is not None and len(batch) > most:
                raise DataError(
                    f"a step has {len(batch)} microbatches; accepted: 1 to {most}, as in the plan"
                )
            microbatches = []
            for number, microbatch in enumerate(batch):
                with _of_microbatch(number):
                    microbatches.append(self.complete(microbatch))
        else:
            raise DataError(
                f"the batch is {said(batch)}; accepted: a dict, or a list of at least one "
                "microbatch"
            )
        if self.labelled and not any(
            bool(label_mask(microbatch[LABELS]).any()) for microbatch in microbatches
        ):
            raise DataError(
                f"{LABELS} of the step are all {IGNORE_INDEX} after the first token of each row, "
                "which is never predicted; accepted: at least one label, as the loss is a mean "
                "over labels"
            )
        for number, microbatch in enumerate(microbatches):
            with _of_microbatch(number):
                self.attempt(microbatch)
        return microbatches


@contextmanager
def _of_microbatch(number: int) -> Iterator[None]:
    """Add the number of the microbatch to errors."""
    try:
        yield
    except DataError as error:
        raise DataError(f"microbatch {number}: {error}") from error.__cause__


def complete_microbatch(
    microbatch: Mapping[str, Any],
    encoders: Sequence[str],
    vocabulary: Vocabulary | None = None,
    to_send: bool = False,
) -> dict[str, Any]:
    """Return a microbatch with attention mask and sample indices, padded on the right and without
    modalities that are None.

    Args:
        microbatch: see :meth:`raymm.MultimodalModule.forward`.
        vocabulary: None to skip the check of ids.
        to_send: True to require tensors on the CPU that do not require a gradient.

    Raises:
        DataError: the microbatch is not accepted.
    """
    if not isinstance(microbatch, Mapping):
        raise DataError(
            f"a microbatch is {said(microbatch)}; accepted: a dict with {IDS}, {LABELS} and a "
            "dict of tensors per modality"
        )
    accepted = (IDS, LABELS, MASK, *encoders)
    for name, value in microbatch.items():
        if name not in accepted:
            raise DataError(
                f"the batch has {name!r} ({said(value)}), which no module of the model reads; "
                f"accepted: {', '.join(accepted)}"
            )
    text = _text(microbatch, vocabulary, to_send)
    rows = len(text[IDS])
    items = {
        name: _items(name, microbatch[name], rows, to_send)
        for name in microbatch if name in encoders and microbatch[name] is not None
    }
    return {**items, **text}


def check_tensor(name: str, value: Any, accepted: str, to_send: bool = True) -> torch.Tensor:
    """Return ``value`` if it is a dense tensor of real numbers and, with ``to_send``, on the CPU
    and without a gradient. Otherwise raises DataError with ``name`` and ``accepted``."""
    if not isinstance(value, torch.Tensor):
        raise DataError(f"{name} is {said(value)}; accepted: {accepted}")
    if value.is_nested or value.is_quantized or value.layout is not torch.strided:
        raise DataError(f"{name} is {said(value)}; accepted: {accepted}, dense")
    if value.is_complex() or value.is_meta:
        raise DataError(f"{name} is {said(value)}; accepted: {accepted}, of real numbers")
    if to_send and value.device.type != "cpu":
        raise DataError(
            f"{name} is on the device {str(value.device)!r}; accepted: tensors on the CPU "
            "(.cpu()); raymm sends them to ranks"
        )
    if to_send and value.requires_grad:
        raise DataError(
            f"{name} has requires_grad; accepted: tensors without (.detach()), since no gradient "
            "flows back to a batch"
        )
    return value


def _text(
    microbatch: Mapping[str, Any], vocabulary: Vocabulary | None, to_send: bool
) -> dict[str, torch.Tensor]:
    accepted = "an int64 tensor (rows, tokens)"
    ids = check_tensor(IDS, microbatch.get(IDS), accepted, to_send)
    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise DataError(
            f"{IDS} is {said(ids)}; accepted: {accepted} with at least one row and one token"
        )
    shape = tuple(ids.shape)
    accepted = f"an int64 tensor of the shape of {IDS}, {shape}, {IGNORE_INDEX} for no label"
    labels = check_tensor(LABELS, microbatch.get(LABELS), accepted, to_send)
    if labels.dtype != torch.int64 or labels.shape != ids.shape:
        raise DataError(f"{LABELS} is {said(labels)}; accepted: {accepted}")
    mask = microbatch.get(MASK)
    accepted = f"a tensor of bools or integers of the shape of {IDS}, {shape}, or None for all"
    if mask is None:
        mask = torch.ones_like(ids)
    mask = check_tensor(MASK, mask, accepted, to_send)
    if mask.dtype not in _INTEGERS or mask.shape != ids.shape:
        raise DataError(f"{MASK} is {said(mask)}; accepted: {accepted}")
    mask = mask.to(ids.dtype)
    check_range(MASK, mask, 2, "1 for a token, 0 for padding")
    if vocabulary is not None:
        check_range(IDS, ids, vocabulary.ids, f"0 to {vocabulary.ids - 1}, the model's vocabulary")
        check_range(
            LABELS, labels, vocabulary.labels,
            f"0 to {vocabulary.labels - 1}, the ids that the model predicts, and {IGNORE_INDEX}",
            IGNORE_INDEX,
        )
    return _padded_right(ids, labels, mask)


def check_range(
    name: str, values: torch.Tensor, stop: int, accepted: str, also: int | None = None
) -> None:
    """Check that int64 values are in ``[0, stop)``, or equal to ``also``. Otherwise raises
    DataError with the first wrong value and ``accepted``."""
    low, high = (int(value) for value in values.aminmax())
    if low >= 0 and high < stop:
        return
    wrong = (values < 0) | (values >= stop)
    if also is not None:
        wrong &= values != also
    if wrong.any():
        index = tuple(wrong.nonzero()[0].tolist())
        raise DataError(f"{name}{list(index)} is {values[index].item()}; accepted: {accepted}")


def _padded_right(
    ids: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the rows with their padding on the right."""
    if not mask.all():
        rises = (mask[:, 1:] > mask[:, :-1]).sum(dim=1)
        runs = mask[:, 0] + rises
        if (runs != 1).any():
            row = int((runs != 1).nonzero()[0])
            has = "no 1" if not runs[row] else f"{int(runs[row])} runs of 1"
            raise DataError(
                f"{MASK}[{row}] has {has}; accepted: rows of at least one token, and padding only "
                "before or after it"
            )
        wrong = (labels != IGNORE_INDEX) & (mask == 0)
        if wrong.any():
            index = tuple(wrong.nonzero()[0].tolist())
            raise DataError(
                f"{LABELS}{list(index)} is {int(labels[index])} where {MASK} is 0; accepted: "
                f"{IGNORE_INDEX} for padding"
            )
        if rises.any():
            order = torch.argsort(mask, dim=1, descending=True, stable=True)
            ids, labels, mask = (tensor.gather(1, order) for tensor in (ids, labels, mask))
    return {IDS: ids, LABELS: labels, MASK: mask}


def _items(name: str, value: Any, rows: int, to_send: bool) -> dict[str, torch.Tensor]:
    accepted = (
        "a dict of the encoder's keyword arguments to tensors, items along their first dimension"
    )
    if not isinstance(value, Mapping):
        raise DataError(
            f"{name!r} is {said(value)}; accepted: {accepted}, or None where there are none"
        )
    tensors = {
        key: check_tensor(f"{key!r} of {name!r}", tensor, "a tensor of all items", to_send)
        for key, tensor in value.items() if key != INDEX
    }
    if not tensors:
        raise DataError(f"{name!r} has no tensor; accepted: {accepted}, or None")
    for key, tensor in tensors.items():
        if not isinstance(key, str) or not tensor.numel():
            raise DataError(
                f"{key!r} of {name!r} is {said(tensor)}; accepted: tensors of at least one item by "
                "name; None in place of the dict, where there are no items"
            )
        if not tensor.dim():
            raise DataError(f"{key!r} of {name!r} is {said(tensor)}; accepted: {accepted}")
    return {**tensors, INDEX: _sample_index(name, tensors, value.get(INDEX), rows, to_send)}


def _sample_index(
    name: str, tensors: Mapping[str, torch.Tensor], index: Any, rows: int, to_send: bool
) -> torch.Tensor:
    sizes = {key: len(tensor) for key, tensor in tensors.items()}
    shown = ", ".join(f"{key!r}: {count}" for key, count in sizes.items())
    if index is None:
        if set(sizes.values()) != {rows}:
            raise DataError(
                f"{name!r} has items ({shown}) for {rows} rows and no {INDEX!r}; accepted: an item "
                f"per row, or {INDEX!r}, an int64 tensor with the row of every item"
            )
        return torch.arange(rows)
    accepted = f"an int64 tensor with the row, 0 to {rows - 1}, of every item ({shown})"
    field = f"{INDEX!r} of {name!r}"
    index = check_tensor(field, index, accepted, to_send)
    if index.dtype != torch.int64 or index.dim() != 1 or len(index) not in sizes.values():
        raise DataError(f"{field} is {said(index)}; accepted: {accepted}")
    check_range(field, index, rows, accepted)
    return index


def said(value: Any) -> str:
    """Describe a value for an error message."""
    if value is None:
        return "missing"
    if isinstance(value, torch.Tensor):
        kind = "" if value.layout is torch.strided else f"{_short(value.layout)} "
        kind += "nested " * value.is_nested + "quantised " * value.is_quantized
        shape = "" if value.is_nested else f" and shape {tuple(value.shape)}"
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"a {kind}tensor of dtype {_short(value.dtype)}{shape}{where}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"a {type(value).__name__} of dtype {value.dtype} and shape {value.shape}"
    if isinstance(value, str | int | float | bool):
        return repr(value)[:80]
    if isinstance(value, Sequence):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"


def _short(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def text_inputs(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the input of the first language stage: text tensors, and the row of each item by
    modality."""
    text = {k: v for k, v in microbatch.items() if not isinstance(v, Mapping)}
    index = {k: v["sample_index"] for k, v in microbatch.items() if isinstance(v, Mapping)}
    return {**text, "sample_index": index}
