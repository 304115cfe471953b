"""Rows and tokens of a process, for slicing random numbers."""

import pytest
import torch

from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.draw_grids import rows_of_share, sample_rows, share_of_rows, text_grid
from raymm.kernels.shared_draws import Cut
from raymm.scheduler.graph.sample_ranges import Range

LENGTHS = [2, 3, 1, 4]


def layout():
    layout = torch.zeros(3, 4, 4, dtype=torch.int16)
    for row, length in enumerate(LENGTHS):
        layout[2, row, length:] = -1
    return layout


@pytest.mark.parametrize("packing", [False, True])
def test_shares_of_rows_are_the_numbers_of_one_process(packing):
    merged = {"targets": torch.zeros(4, 4), "token_layout": layout()}
    numbers = torch.arange(sum(LENGTHS))[None] if packing else torch.arange(16).view(4, 4)
    parts = []
    for rows in (range(0, 1), range(1, 4)):
        drawn = rows_of_share(rows, merged, packing)
        shape = (1, sum(LENGTHS[rows.start : rows.stop])) if packing else (len(rows), 4)
        grid = text_grid(MicrobatchContext(1), shape, drawn, None, packing)
        parts.append(grid.tokens.take(grid.rows.take(numbers, 0), 1))
        assert parts[-1].shape == shape
    assert torch.equal(torch.cat(parts, 1 if packing else 0), numbers)


def test_samples_of_a_stage_have_their_rows():
    context = MicrobatchContext(1, sample_count=3, samples=(Range(1, 3),))
    assert sample_rows(context, "llm", 2) == Cut(2, 3, ((1, 3),))
    context = context._replace(offsets={"vision": [0, 2, 2, 5]})
    assert sample_rows(context, "vision", 3) == Cut(3, 5, ((2, 5),))
    assert share_of_rows(Cut(3, 5, ((2, 5),)), 1, 2) == Cut(2, 5, ((3, 5),))
    assert sample_rows(MicrobatchContext(1), "llm", 4).is_uncut
