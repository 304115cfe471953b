"""Collation of encoded samples into the tensors of one microbatch, and exchange of their items.

Legend: ``B`` samples, ``T`` tokens of the longest sample.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raymm.actors.features.kept_features import FEATURES
from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.errors import DataError

# Function that stacks the tensors of all items of a microbatch: ``torch.stack``, or a wrapper that
# stacks during a later copy (``raymm.data.loading.object_store.ItemStack``).
Stack = Callable[[list[torch.Tensor]], Any]
Microbatch = dict  # {"input_ids", "attention_mask", "labels": (B, T) int64; modality: {...}}


@dataclass(frozen=True)
class EncodedSample:
    """Sample as token ids, labels and item tensors.

    Attributes:
        media: modality -> tensors of each item.
        keys: modality -> cache key of the features of each item.
        rejected: the same prompt with the rejected answer, if the row has two answers.
        truncated: number of rows of the sample that were truncated to ``max_length``.
    """

    id: str
    input_ids: list[int]
    labels: list[int]
    media: dict[str, list[dict[str, torch.Tensor]]] = field(default_factory=dict)
    keys: dict[str, list[str]] = field(default_factory=dict)
    rejected: "EncodedSample | None" = None
    source: int = 0
    truncated: int = 0

    @property
    def rows(self) -> "list[EncodedSample]":
        """This sample, followed by the rejected one if there is one; a row each."""
        return [self] if self.rejected is None else [self, self.rejected]


@dataclass(frozen=True)
class MicrobatchMeta:
    """Metadata of a microbatch, which the driver has instead of the tensors.

    Attributes:
        num_samples: B.
        seq_len: T.
        tokens: text tokens without padding.
        lengths: text tokens without padding by row.
        label_tokens: number of ``labels[:, 1:] != -100``; the loss of a step is divided by their
            sum.
        items: modality -> row of each item, ascending.
        shapes: {"text" or modality: {tensor name: shape}}.
        dtypes: {"text" or modality: {tensor name: dtype, as printed by torch}}.
        places: modality -> runs of its placeholder tokens as (row, start, stop), in order; only for
            modalities with a known placeholder.
        feature_keys: modality -> cache key of each item, for modalities whose features must still
            be added to the cache.
        digests: digests of integer inputs of a Hugging Face VLM that are not per token (grids,
            sizes) and determine the shapes of features.
        truncated: rows truncated to ``max_length``.
        divisors: loss -> what its sum over the samples is divided by, for a graph of modules.
    """

    num_samples: int
    seq_len: int
    tokens: int
    lengths: tuple[int, ...]
    label_tokens: int
    items: dict[str, list[int]]
    shapes: dict[str, dict[str, tuple[int, ...]]]
    sample_ids: tuple[str, ...]
    dtypes: dict[str, dict[str, str]]
    places: dict[str, tuple[tuple[int, int, int], ...]] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)
    feature_keys: dict[str, tuple[str, ...]] = field(default_factory=dict)
    truncated: int = 0
    divisors: dict[str, float] = field(default_factory=dict)

    @property
    def featured(self) -> tuple[str, ...]:
        """Modalities with cached features instead of encoder inputs."""
        return tuple(name for name in self.items if FEATURES in self.shapes.get(name, ()))


def collate(
    samples: Sequence[EncodedSample],
    pad_id: int,
    columns: Mapping[str, str] | None = None,
    stack: Stack = torch.stack,
) -> Microbatch:
    """Collate at least one sample into a microbatch, padded on the right. Raise a ``DataError`` if
    items of a modality differ in tensor names, shapes or dtypes.

    Returns:
        {"input_ids", "attention_mask", "labels"}: (B, T) int64, and for every modality with items,
        {encoder argument: (items, ...), "sample_index": (items,) int64}.
    """
    B, T = len(samples), max(len(sample.input_ids) for sample in samples)
    microbatch: Microbatch = {
        "input_ids": torch.full((B, T), pad_id),
        "attention_mask": torch.zeros((B, T), dtype=torch.int64),
        "labels": torch.full((B, T), IGNORE_INDEX),
    }
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        microbatch["input_ids"][row, :length] = torch.tensor(sample.input_ids)
        microbatch["attention_mask"][row, :length] = 1
        microbatch["labels"][row, :length] = torch.tensor(sample.labels)
    for name in dict.fromkeys(name for sample in samples for name in sample.media):
        microbatch[name] = _stack_items(samples, name, (columns or {}).get(name), stack)
    return microbatch


def _stack_items(
    samples: Sequence[EncodedSample], name: str, column: str | None, stack: Stack
) -> dict[str, torch.Tensor]:
    rows = [row for row, sample in enumerate(samples) for _ in sample.media.get(name, ())]
    items = [item for sample in samples for item in sample.media.get(name, ())]
    first = _signature(items[0])
    for row, item in zip(rows, items, strict=True):
        if _signature(item) != first:
            where = f"modality {name!r}" + (f", column {column!r}" if column else "")
            raise DataError(
                f"{where}: an item of sample {samples[row].id!r} has {_signature(item)}, but "
                f"one of sample {samples[rows[0]].id!r} of the same microbatch has {first}. "
                "Items of a microbatch must have the same shape: let the processor resize, crop "
                "or pad to one size, or, if no sample has several items, put every sample in a "
                "separate microbatch (data.microbatches equal to data.batch_size)"
            )
    stacked = {key: stack([item[key] for item in items]) for key in items[0]}
    return stacked | {"sample_index": torch.tensor(rows)}


def _signature(item: dict[str, torch.Tensor]) -> dict[str, tuple]:
    return {key: (tuple(value.shape), value.dtype) for key, value in sorted(item.items())}


def split_parts(microbatch: Microbatch) -> dict[str, dict[str, torch.Tensor]]:
    """Split a microbatch into the parts that different stages need: {"text": {...}, modality:
    {...}}."""
    text = {key: value for key, value in microbatch.items() if not isinstance(value, dict)}
    modalities = {key: value for key, value in microbatch.items() if isinstance(value, dict)}
    return {"text": text} | modalities


def join_parts(parts: dict[str, dict[str, torch.Tensor]]) -> Microbatch:
    """Invert ``split_parts``."""
    return {**parts["text"], **{name: tensors for name, tensors in parts.items() if name != "text"}}


def describe(
    microbatch: Microbatch, sample_ids: Sequence[str], placeholders: Mapping[str, int] | None = None
) -> MicrobatchMeta:
    """Return the ``MicrobatchMeta`` of a microbatch from :func:`collate`."""
    inputs = split_parts(microbatch)
    B, T = microbatch["input_ids"].shape
    return MicrobatchMeta(
        num_samples=B,
        seq_len=T,
        tokens=int(microbatch["attention_mask"].sum()),
        lengths=tuple(microbatch["attention_mask"].sum(dim=1).tolist()),
        label_tokens=int((microbatch["labels"][:, 1:] != IGNORE_INDEX).sum()),
        items={k: v["sample_index"].tolist() for k, v in inputs.items() if k != "text"},
        shapes={
            part_name: {key: tuple(value.shape) for key, value in tensors.items()}
            for part_name, tensors in inputs.items()
        },
        sample_ids=tuple(sample_ids),
        dtypes={
            part_name: {key: str(value.dtype) for key, value in tensors.items()}
            for part_name, tensors in inputs.items()
        },
        places={
            name: _runs(microbatch["input_ids"] == token)
            for name, token in (placeholders or {}).items()
        },
    )


def _runs(places: torch.Tensor) -> tuple[tuple[int, int, int], ...]:
    """Return the runs of true values in a (B, T) bool tensor as (row, start, stop), in order."""
    edges = torch.nn.functional.pad(places.to(torch.int8), (1, 1)).diff(dim=1)
    starts, stops = (edges == 1).nonzero(), (edges == -1).nonzero()
    return tuple(
        (row, start, stop)
        for (row, start), (_, stop) in zip(starts.tolist(), stops.tolist(), strict=True)
    )


def shuffle_modality(
    microbatch: Microbatch, name: str, generator: torch.Generator | None = None, rows: int = 1
) -> Microbatch:
    """Return a copy of a microbatch in which other samples get the items of one modality.

    ``sample_index`` is unchanged, so each sample keeps its number of items. No item stays with its
    sample, unless a sample owns more than half of the items; then as few as possible stay. A
    microbatch without the modality is returned unchanged.

    Args:
        microbatch: from ``collate``; not modified.
        rows: consecutive rows that share the items of a sample, such as 2 for pairs of answers. All
            rows of a sample get the items of the same other sample.
    """
    if name not in microbatch:
        return microbatch
    inputs = microbatch[name]
    owners = inputs["sample_index"].tolist()
    copies = [[i for i, row in enumerate(owners) if row % rows == copy] for copy in range(rows)]
    owner = [owners[item] // rows for item in copies[0]]
    # A ring of all items in which samples, and the items of each sample, are in random order.
    # Rotating it by the largest number of items of a sample moves every item to another sample.
    rank = torch.randperm(max(owner) + 1, generator=generator).tolist()
    item_order = torch.randperm(len(owner), generator=generator).tolist()
    ring = sorted(item_order, key=lambda item: rank[owner[item]])
    shift = max(owner.count(sample) for sample in set(owner)) % len(ring)
    source = torch.empty(len(owners), dtype=torch.int64)
    for items in map(torch.tensor, copies):
        source[items[ring]] = items[ring[shift:] + ring[:shift]]
    moved = {k: value if k == "sample_index" else value[source] for k, value in inputs.items()}
    return {**microbatch, name: moved}
