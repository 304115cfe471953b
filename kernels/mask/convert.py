"""Conversion of masks from and to other forms: the paper's int64 field, dense bool, FlexAttention.

The int64 field (Cornstarch v2 §4.2, Fig. 4) has one entry per token: bit 0 for text, bits 1 to 62
for encoders, bit 63 for causal. It is read as two sets, because otherwise text after an image would
not see the image, or images would see later text:

- the attend bits of a query: bits 0 to 62 of the field;
- the identity of a key: text (bit 0) alone if its causal bit is set, else the field's bits.

A query with the causal bit sees only ``k <= q``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from raymm.errors import ModelError
from raymm.kernels.mask.mask import ALL_KINDS, AttentionMask, as_masks, query_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn.attention.flex_attention import BlockMask

    from raymm.kernels.mask.tiles import Tiles

CAUSAL_BIT = -(1 << 63)
"""Bit 63 of an int64."""
_TEXT = 1


def from_bitfield(field: torch.Tensor | np.ndarray) -> AttentionMask:
    """Convert the paper's int64 field, (T,).

    Raises:
        ModelError: ``field`` is not (T,) int64.
    """
    field = np.asarray(field)
    if field.ndim != 1 or field.dtype != np.int64:
        raise ModelError(f"a bit field must be (T,) int64, got {field.shape} {field.dtype}")
    length = len(field)
    is_causal = field < 0
    bits = field & ALL_KINDS
    starts = np.flatnonzero(np.diff(field, prepend=field[:1] ^ 1) != 0)
    table = query_rows(
        starts,
        hi=np.where(is_causal[starts], 1, length),
        hi_slope=is_causal[starts],
        attend=bits[starts],
    )
    identity = np.where(is_causal, _TEXT, bits)[starts]
    return AttentionMask(table, np.stack([starts, identity], axis=1), length, length)


def to_bitfield(mask: AttentionMask) -> torch.Tensor:
    """Convert a mask to the paper's int64 field, (T,).

    Raises:
        ModelError: the field cannot express the mask (cross masks, two intervals, documents,
            windows, isolated items); names the first such row.
    """
    if mask.n_queries != mask.n_keys:
        raise ModelError(f"a bit field describes self attention, the mask is {mask.shape}")
    length = mask.n_queries
    lo1, hi1, lo2, hi2 = mask.bounds()
    arrays = mask.rows()
    attend, identity = arrays.attend.numpy(), arrays.identity.numpy()
    rows = np.arange(length)
    sees_all, past = hi1 == length, hi1 == rows + 1
    # The last row's past is all keys, so the identity of its key decides.
    causal = past & ~(sees_all & (identity != _TEXT))
    key_bits = np.bitwise_or.reduce(identity) if length else 0
    attend = attend & key_bits  # ignore bits that no key has
    implied = np.where(causal, _TEXT, attend)
    wrong = (lo1 != 0) | (hi2 > lo2) | ~(sees_all | past) | (implied != identity)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ModelError(
            f"row {row} (keys [{lo1[row]}, {hi1[row]}) and [{lo2[row]}, {hi2[row]}), attend "
            f"{attend[row]:#x}, identity {identity[row]:#x}) cannot be written as a bit field; "
            "accepted: rows that see all keys, or all keys up to their own position, and whose "
            "identity equals their attend bits or is text"
        )
    return torch.from_numpy(np.where(causal, attend | CAUSAL_BIT, attend))


def from_dense(visible: torch.Tensor) -> AttentionMask:
    """Convert a dense bool mask, (Tq, Tk), in O(Tq * Tk): for tests and short sequences.

    Rows with up to two runs of visible keys become intervals. If a row has more runs, keys are
    grouped into kinds that such rows see or hide together.

    Raises:
        ModelError: not (Tq, Tk) bool, or more than 63 kinds of keys would be needed.
    """
    if visible.dim() != 2 or visible.dtype != torch.bool:
        raise ModelError(f"a dense mask must be (Tq, Tk) bool, got {visible.shape} {visible.dtype}")
    dense = visible.cpu().numpy()
    n_queries, n_keys = dense.shape
    edges = np.diff(np.pad(dense, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    bounds = np.zeros((n_queries, 4), dtype=np.int64)
    scattered = []  # rows of more than two runs
    for row in range(n_queries):
        starts, stops = np.flatnonzero(edges[row] == 1), np.flatnonzero(edges[row] == -1)
        if len(starts) > 2:
            scattered.append(row)
            starts, stops = starts[:1], stops[-1:]
        bounds[row, 0 : 2 * len(starts) : 2] = starts
        bounds[row, 1 : 2 * len(stops) : 2] = stops
    kinds = _kinds_of_keys(dense[scattered], bounds[scattered])
    attend = np.full(n_queries, ALL_KINDS)
    for row in scattered:
        seen = kinds[np.flatnonzero(dense[row])]
        attend[row] = np.bitwise_or.reduce(np.left_shift(1, seen))
    table = _join_affine(bounds, attend)
    keys = np.stack([np.arange(n_keys), np.left_shift(1, kinds)], axis=1)
    return AttentionMask(table, keys, n_queries, n_keys)


def _kinds_of_keys(scattered: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Return (Tk,) the kind of each key. Two keys may share a kind if every scattered row whose
    span contains both treats them equally."""
    scattered, index = np.unique(scattered, axis=0, return_index=True)
    n_keys = scattered.shape[1]
    bounds = bounds[index]
    kinds = np.zeros(n_keys, dtype=np.int64)
    if not len(scattered):
        return kinds
    position = np.arange(n_keys)
    in_span = (bounds[:, :1] <= position) & (position < bounds[:, 1:2])
    # (rows, Tk); 0: either value fits
    constraint = np.where(in_span, np.where(scattered, 1, -1), 0)
    profiles: list[np.ndarray] = []
    for key in range(n_keys):
        for kind, profile in enumerate(profiles):
            if not (constraint[:, key] * profile == -1).any():
                profiles[kind] = np.where(profile == 0, constraint[:, key], profile)
                kinds[key] = kind
                break
        else:
            kinds[key] = len(profiles)
            profiles.append(constraint[:, key])
    if len(profiles) > 63:
        raise ModelError(
            f"the dense mask needs {len(profiles)} kinds of keys in addition to two intervals per "
            "row; a mask can have at most 63"
        )
    return kinds


def _join_affine(bounds: np.ndarray, attend: np.ndarray) -> np.ndarray:
    """Return a query table with few segments, by joining rows whose bounds stay or move by one."""
    n_queries = len(bounds)
    starts, slopes = [], []
    start = 0
    while start < n_queries:
        slope = np.zeros(4, dtype=np.int64)
        stop = start + 1
        if stop < n_queries:
            step = bounds[stop] - bounds[start]
            if ((step == 0) | (step == 1)).all():
                slope = step
        while (
            stop < n_queries
            and attend[stop] == attend[start]
            and (bounds[stop] == bounds[start] + slope * (stop - start)).all()
        ):
            stop += 1
        starts.append(start)
        slopes.append(slope)
        start = stop
    first_rows = np.array(starts, dtype=np.int64)
    slope = np.array(slopes, dtype=np.int64).reshape(-1, 4)
    base = bounds[first_rows] - slope * first_rows[:, None]
    return np.concatenate([first_rows[:, None], attend[first_rows][:, None], base, slope], axis=1)


def to_block_mask(
    mask: AttentionMask | Sequence[AttentionMask],
    batch: int = 1,
    block: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Convert to FlexAttention's BlockMask, from tiles and without a dense mask.

    Args:
        mask: one for all sequences or one each, of one shape.
        block: FlexAttention's ``BLOCK_SIZE``.
    """
    from torch.nn.attention.flex_attention import BlockMask

    from raymm.kernels.mask.tiles import (
        key_runs,  # imported here, because it loads numba
    )

    first = mask if isinstance(mask, AttentionMask) else mask[0]
    masks = as_masks(mask, batch, *first.shape)
    arrays = [mask.rows(device) for mask in masks]
    bounds = torch.stack([rows.bounds for rows in arrays])
    attend = torch.stack([rows.attend for rows in arrays])
    identity = torch.stack([rows.identity for rows in arrays])

    def visible(b, h, q, k):
        first = (bounds[b, 0, q] <= k) & (k < bounds[b, 1, q])
        second = (bounds[b, 2, q] <= k) & (k < bounds[b, 3, q])
        return (first | second) & ((attend[b, q] & identity[b, k]) != 0)

    n_blocks = -(-first.n_keys // block)
    tables = [_flex_tables(key_runs(mask, block, block), n_blocks) for mask in masks]
    partial, partial_index, full, full_index = (
        torch.from_numpy(np.stack(table))[:, None].to(device)
        for table in zip(*tables, strict=True)
    )
    return BlockMask.from_kv_blocks(
        partial, partial_index, full, full_index, BLOCK_SIZE=block, mask_mod=visible,
        seq_lengths=first.shape,
    )


def _flex_tables(tiles: Tiles, n_blocks: int) -> tuple[np.ndarray, ...]:
    """Return number and indices of partial tiles per query block, then of full tiles (int32)."""
    n = len(tiles.offsets) - 1
    tables = []
    for is_full in (0, 1):
        counts = np.zeros(n, dtype=np.int32)
        indices = np.zeros((n, n_blocks), dtype=np.int32)
        for row in range(n):
            runs = tiles.runs[tiles.offsets[row] : tiles.offsets[row + 1]]
            blocks = [np.arange(a, b) for a, b, full in runs if full == is_full]
            columns = np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.int64)
            counts[row] = len(columns)
            indices[row, : len(columns)] = columns
        tables += [counts, indices]
    return tuple(tables)


def from_block_mask(block_mask: BlockMask, batch: int = 0, head: int = 0) -> AttentionMask:
    """Convert one sequence and head of a BlockMask by evaluating its ``mask_mod`` for every pair,
    in O(Tq * Tk): for tests and short sequences.

    Raises:
        ModelError: see :func:`from_dense`.
    """
    n_queries, n_keys = block_mask.seq_lengths
    device = block_mask.kv_indices.device
    query = torch.arange(n_queries, device=device)[:, None]
    key = torch.arange(n_keys, device=device)[None]
    b, h = (torch.tensor(value, device=device) for value in (batch, head))
    visible = block_mask.mask_mod(b, h, query, key)
    return from_dense(visible.expand(n_queries, n_keys).clone())


BLIND_ROWS = ("nothing", "everything")
"""Accepted values of ``blind``: keys of rows that see no item."""


def cross_masks(
    shown: torch.Tensor, tokens_per_item: int, *, blind: str = "nothing"
) -> tuple[AttentionMask, ...]:
    """Return one mask per sequence of the visual tokens that each text token sees.

    Idefics: ``cross_masks(image_attention_mask, tokens_per_image)``. Mllama:
    ``cross_masks(cross_attention_mask.flatten(2), patches_per_tile, blind="everything")``: rows
    without a visible tile attend to all tiles, and only the layer's MLP ignores them.

    Args:
        shown: (B, T, I), nonzero where a text token sees an item. Covers the full text, and is the
            same on every process.
        tokens_per_item: visual tokens of each item; V = I * tokens_per_item.
        blind: keys of rows that see no item; one of :data:`BLIND_ROWS`.

    Returns:
        B masks of T rows and V keys. Sequences with equal ``shown`` share one object.

    Raises:
        ModelError: not (B, T, I), no tokens per item, an unknown ``blind``, or the items cannot be
            expressed with two runs per row and 63 kinds of keys.
    """
    if shown.dim() != 3:
        raise ModelError(f"shown items must be (B, T, I), got {tuple(shown.shape)}")
    if tokens_per_item < 1:
        raise ModelError(f"tokens_per_item must be at least 1, got {tokens_per_item}")
    if blind not in BLIND_ROWS:
        raise ModelError(f"blind must be one of {', '.join(BLIND_ROWS)}, got {blind!r}")
    distinct: dict[bytes, AttentionMask] = {}
    masks = []
    for sees in (shown != 0).cpu().numpy():
        if blind == "everything":
            sees = sees | ~sees.any(axis=1, keepdims=True)
        masks.append(distinct.setdefault(sees.tobytes(), _of_items(sees, tokens_per_item)))
    return tuple(masks)


def _of_items(sees: np.ndarray, tokens: int) -> AttentionMask:
    """Return the mask of one sequence, (T, I) bool. Builds a mask of items for rows that differ
    from the row before, then multiplies every bound by the tokens of an item."""
    length, items = sees.shape
    changes = np.flatnonzero((sees[1:] != sees[:-1]).any(axis=1)) + 1
    starts = np.append(np.zeros(min(length, 1), dtype=np.int64), changes)
    small = from_dense(torch.from_numpy(sees[starts]))
    lo, hi, lo2, hi2 = small.bounds() * tokens
    attend = small.rows().attend.numpy()
    table = query_rows(starts, lo=lo, hi=hi, lo2=lo2, hi2=hi2, attend=attend)
    keys = small.key_table * np.array([tokens, 1])
    return AttentionMask(table, keys, length, items * tokens)
