"""Helpers of the kernels: the mask test, run cursors, loads and stores of rows."""

from __future__ import annotations

import torch

from tests.support.interpreted_triton import device


def _visible() -> None:
    from tests.support.triton_ops import seen_keys

    cases = ((0, 5), (9, 3)), ((3, 0), (0, 0)), ((14, 20), (2, 1)), ((-2, 4), (5, 1))
    for first, second in cases:
        out = torch.empty(16, dtype=torch.int32, device=device())
        seen_keys[(1,)](out, *first, *second, 16)
        expected = [
            any(lo <= key < lo + length for lo, length in (first, second)) for key in range(16)
        ]
        assert out.bool().tolist() == expected


def test_keys_in_either_interval_are_visible(triton_worker):
    triton_worker(_visible)


def _copy_rows() -> None:
    from tests.support.triton_ops import double_rows

    for rows, columns in ((8, 16), (5, 16), (3, 8)):
        source = torch.randn(8, 16, device=device())
        target, expected = torch.zeros_like(source), torch.zeros_like(source)
        double_rows[(1,)](source, target, rows, 2, columns, 16)
        expected[:rows, :columns] = 2 * source[:rows, :columns]
        assert torch.equal(target, expected)


def test_rows_and_columns_beyond_the_tensor_are_not_touched(triton_worker):
    triton_worker(_copy_rows)


def _runs() -> None:
    from tests.support.triton_ops import visited_blocks

    table = [[2, 5], [7, 8], [11, 13], [0, 0]]
    runs = torch.tensor(table, dtype=torch.int32, device=device())
    out = torch.empty(6, dtype=torch.int32, device=device())
    visited_blocks[(1,)](out, runs, 6)
    assert out.tolist() == [2, 3, 4, 7, 11, 12]


def test_a_cursor_visits_the_blocks_of_all_runs(triton_worker):
    triton_worker(_runs)
