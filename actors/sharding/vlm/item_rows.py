"""Items of different sizes, whose rows are concatenated in one tensor, and their distribution.

Legend: ``N`` items, ``R`` rows of items (patches, frames).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from raymm.actors.sharding.sample_rows import shares
from raymm.errors import ModelError
from raymm.kernels.collectives.gather import gather_items
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.host_copies import on_host

Entries = Mapping[str, torch.Tensor]


def rows_per_item(name: str, entries: Entries, items: int) -> dict[str, torch.Tensor]:
    """Return each item's row count (N,) int64, per tensor (N, ...) or (R, ...).

    It is one, or the product of an item's sizes (a row of integers, such as a grid of patches, or a
    number).

    Raises:
        ModelError: the rows do not add up.
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
            products = ", ".join(f"{size} gives {int(n.sum())}" for size, n in sizes.items())
            raise ModelError(
                f"{key!r} of {name!r} has {len(value)} rows for {items} items "
                f"({products or 'no sizes'}); accepted: a row per item, or as many as the items' "
                "sizes multiply to"
            )
        rows[key] = fits[0].long()
    return rows


def take_items(name: str, entries: Entries, own: torch.Tensor) -> dict[str, torch.Tensor]:
    """Select items by an (N,) bool mask, with all of their rows.

    Raises:
        ModelError: the rows do not add up.
    """
    rows = rows_per_item(name, entries, len(own))
    return {
        key: value[torch.repeat_interleave(own, rows[key]).to(value.device)]
        for key, value in entries.items()
    }


def items_of_share(
    name: str, entries: Entries, place: int, processes: int, zeros_left_out: bool = False
) -> tuple[dict[str, torch.Tensor], int]:
    """Return a process's items, or the first one if it has none, and the number of its items.

    Args:
        entries: tensors (N, ...) or (R, ...).
        place: rank of the process among ``processes``.
        zeros_left_out: True if all-zero items are padding, which gives no features.

    Raises:
        ModelError: the rows do not add up.
    """
    count = min(map(len, entries.values()))
    items = _not_zero(entries, count) if zeros_left_out else list(range(count))
    share = shares(len(items), processes)[place]
    return _taken(name, entries, [items[n] for n in share or range(1)]), len(share)


def share_lengths(
    name: str, shares: Sequence[Entries], totals: Sequence[int]
) -> list[list[int]]:
    """Return the rows of each share in several outputs for the items of all shares, given the
    ``totals`` of rows. An output has a row per item, or rows in proportion to those of the items in
    the longest entry (patches).

    Raises:
        ModelError: an output has another number of rows.
    """
    items = [min(map(len, share.values())) for share in shares]
    rows = [max(map(len, share.values())) for share in shares]
    result = []
    for total in totals:
        weights = items if total == sum(items) else rows
        if any(total * weight % sum(weights) for weight in weights):
            raise ModelError(
                f"features of {name!r} have {total} rows for microbatches of {items} items and "
                f"{rows} rows; accepted with microbatch_factor above 1: a row per item, or rows "
                "in proportion to those of the items"
            )
        result.append([total * weight // sum(weights) for weight in weights])
    return result


def each_item(
    name: str, entries: Entries, zeros_left_out: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Return every item separately, without padding; see :func:`items_of_share`.

    Raises:
        ModelError: the rows do not add up.
    """
    count = min(map(len, entries.values()))
    items = _not_zero(entries, count) if zeros_left_out else range(count)
    return [_taken(name, entries, [item]) for item in items]


def _taken(name: str, entries: Entries, items: Sequence[int]) -> dict[str, torch.Tensor]:
    hosts = {key: on_host(value) if value.dim() <= 2 and not value.is_floating_point() else value
             for key, value in entries.items()}  # fmt: skip
    is_taken = torch.zeros(min(map(len, entries.values())), dtype=torch.bool)
    is_taken[list(items)] = True
    entries_taken = take_items(name, hosts, is_taken)
    return {key: value.to(entries[key].device) for key, value in entries_taken.items()}


def _not_zero(entries: Entries, count: int) -> list[int]:
    """Return items with a non-zero float; all items if there are none."""
    shown = torch.zeros(count, dtype=torch.bool)
    for value in entries.values():
        if value.is_floating_point() and len(value) == count:
            shown |= on_host((value != 0).flatten(1).any(dim=1))
    return shown.nonzero()[:, 0].tolist() or list(range(count))


def gather_parts(parts: Sequence[torch.Tensor], exchange: Exchange) -> list[torch.Tensor]:
    """Gather tensors of all processes along dimension 0, after an exchange of their lengths.

    The backward is that of :func:`raymm.kernels.collectives.gather.gather_items`.
    """
    device = parts[0].device
    lengths = torch.tensor([len(tensor) for tensor in parts], dtype=torch.int64).to(device)
    peers = [rank for rank in range(exchange.size) if rank != exchange.rank]
    shape = (tuple(lengths.shape), lengths.dtype)
    pending = exchange.start(
        [(rank, lengths) for rank in peers], [(rank, shape) for rank in peers], device
    )
    by_rank = dict(zip(peers, pending.wait(), strict=True)) | {exchange.rank: lengths}
    sizes = torch.stack([by_rank[rank] for rank in range(exchange.size)]).tolist()
    return [
        gather_items(tensor.to(device), [counts[n] for counts in sizes], exchange).to(tensor.device)
        for n, tensor in enumerate(parts)
    ]
