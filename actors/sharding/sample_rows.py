"""Fully sharded data parallelism of a stage: distribution of a microbatch's samples over processes.

Shares are contiguous, differ by at most one sample, and follow from the sample count. All processes
run every microbatch. A process without samples runs the first one and discards the result.

Legend: ``B`` rows, ``T`` tokens, ``N`` items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raymm.actors.modules.merge import IGNORE_INDEX
from raymm.actors.modules.message import ROUTED_TOKENS, MicrobatchContext
from raymm.errors import ModelError

# Allowed results of a merge policy, with their row dimension.
_ROWS = {
    "inputs_embeds": 0, "targets": 0, "attention_mask": 0, "token_type_ids": 0,
    "cross_attention_states": 0, "cross_shown": 0, "token_layout": 1, "position_ids": -2,
    ROUTED_TOKENS: 0,
}  # fmt: skip


def shares(count: int, processes: int) -> list[range]:
    """Return the samples of every process, in order; counts differ by at most one."""
    edges = [-(-count * process // processes) for process in range(processes + 1)]
    return [range(lo, hi) for lo, hi in zip(edges, edges[1:], strict=False)]


def row_shares(count: int, processes: int, together: int = 1) -> list[range]:
    """Return the rows of every process, in groups of ``together`` rows; ``count`` is a multiple."""
    groups = shares(count // together, processes)
    return [range(share.start * together, share.stop * together) for share in groups]


def text_of_samples(inputs: Mapping[str, Any], context: MicrobatchContext) -> dict[str, Any]:
    """Select the rows of a stage's samples, and renumber the rows in ``sample_index``.

    ``inputs`` has tensors (B, ...) and ``sample_index`` with (items,) by modality.
    """
    (rows,) = context.samples  # text has exactly one range
    selected: dict[str, Any] = {
        name: value[slice(*rows)] for name, value in inputs.items() if name != "sample_index"
    }
    selected["sample_index"] = {
        name: index[slice(*items)] - rows.lo
        for name, index in inputs["sample_index"].items()
        if (items := context.own_rows(name))
    }
    return selected


def take_rows(
    merged: Mapping[str, Any], place: int, processes: int, together: int = 1
) -> dict[str, torch.Tensor]:
    """Select a process's rows from the result of a merge policy.

    A process without rows gets the first one without labels: its loss and gradients are zero.

    Args:
        merged: ``inputs_embeds`` (B, T, H), ``targets`` (B, T), optionally ``attention_mask`` (B,
            ...), ``token_type_ids`` (B, T), ``position_ids`` (..., B, T) or (T,), ``token_layout``
            (3, B, T), ``cross_attention_states`` (B, V, H), ``cross_shown`` (B, T, items) and
            ``routed_tokens`` (B, T). Entries with a single row for all are kept.
        together: size of groups of rows that stay together.

    Raises:
        ModelError: ``merged`` has other entries.
    """
    if unknown := sorted(set(merged) - set(_ROWS)):
        raise ModelError(
            f"the merge policy returned {unknown}; accepted for a language model with sharding "
            f"'fsdp': {sorted(_ROWS)}"
        )
    count = merged["targets"].shape[0]
    local_rows = row_shares(count, processes, together)[place]
    selected = local_rows or range(1)
    result = {}
    for name, value in merged.items():
        if value.dim() == 1:  # position ids common to all rows
            result[name] = value
            continue
        dim = _ROWS[name] % value.dim()
        rows = value.shape[dim]
        if rows not in (1, count):
            raise ModelError(
                f"the merge policy returned {name} of shape {tuple(value.shape)}, which has "
                f"{rows} rows along dimension {dim}; the microbatch has {count}"
            )
        result[name] = value if rows == 1 else value.narrow(dim, selected.start, len(selected))
    if not local_rows:
        result["targets"] = torch.full_like(result["targets"], IGNORE_INDEX)
        if ROUTED_TOKENS in result:
            result[ROUTED_TOKENS] = torch.zeros_like(result[ROUTED_TOKENS])
    return result


def count_items(inputs: Mapping[str, Any], module: str) -> int:
    """Return the number of items.

    Raises:
        ModelError: a tensor does not have the items in its first dimension.
    """
    tensors = {n: v for n, v in inputs.items() if isinstance(v, torch.Tensor) and v.dim()}
    counts = {value.shape[0] for value in tensors.values()}
    if len(counts) != 1:
        shapes = ", ".join(f"{name} {tuple(value.shape)}" for name, value in tensors.items())
        raise ModelError(
            f"{module!r} gets {shapes or 'no tensor'}; with sharding 'fsdp' the items of a "
            "microbatch are split along the first dimension, which must be the same for all: "
            "use sharding zero1 for this module"
        )
    return counts.pop()


def take_items(inputs: Mapping[str, Any], own: Sequence[int]) -> dict[str, Any]:
    """Select a process's items of an encoder's inputs, or the first one if it has none."""
    own = own or range(1)
    return {
        name: value[own[0] : own[-1] + 1] if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in inputs.items()
    }
