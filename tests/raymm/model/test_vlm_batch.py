"""Items of different sizes are never cut by the split of a batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raymm.actors.sharding.sample_rows import shares
from raymm.actors.sharding.vlm.item_rows import rows_per_item
from raymm.actors.sharding.vlm.token_share import zigzag
from raymm.errors import DataError
from raymm.model.vlm_batch import TextShares, check_rows, split_rows


@st.composite
def batches(draw):
    """Draw a batch of rows with 0 to 5 images each, with the image index of each patch."""
    count, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    images = [draw(st.integers(0, 5)) for _ in range(count * size)]
    grids = [
        [1, draw(st.integers(1, 4)), draw(st.integers(1, 4))] for _ in range(sum(images))
    ]
    patches = [torch.full((g[1] * g[2], 2), float(n)) for n, g in enumerate(grids)]
    batch = {"input_ids": torch.arange(count * size)[:, None]}
    if images and grids:
        batch["pixel_values"] = torch.cat(patches)
        batch["image_grid_thw"] = torch.tensor(grids)
    rows = torch.tensor([row for row, n in enumerate(images) for _ in range(n)])
    return batch, rows, images, patches, count


@given(batches())
@settings(deadline=None, max_examples=60)
def test_each_microbatch_has_only_the_items_of_its_rows(made):
    batch, rows, images, patches, count = made
    towers = {"vision": ("pixel_values", "image_grid_thw")}
    parts = split_rows(batch, towers, {"vision": rows}, count)
    item = 0
    for part in parts:
        own = sum(images[int(row)] for row in part["input_ids"][:, 0])
        if not own:  # no tower runs for it
            assert part.keys() == {"input_ids"}
            continue
        expected = patches[item : item + own]
        torch.testing.assert_close(part["pixel_values"], torch.cat(expected))
        torch.testing.assert_close(
            part["image_grid_thw"], batch["image_grid_thw"][item : item + own]
        )
        item += own
    assert item == len(patches)


def test_grids_that_contradict_patches_are_refused():
    grid = torch.tensor([[1, 2, 2], [1, 2, 3]])
    entries = {"pixel_values": torch.zeros(11, 4), "image_grid_thw": grid}
    with pytest.raises(DataError, match="11 rows for 2 items .image_grid_thw gives 10"):
        check_rows("vision", entries)
    rows = rows_per_item("vision", {**entries, "pixel_values": torch.zeros(10, 4)}, 2)
    assert rows["pixel_values"].tolist() == [4, 6]


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_text_too_short_for_all_processes_is_refused(data):
    rows, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6))
    lengths = [data.draw(st.integers(1, length)) for _ in range(rows)]
    tokens, fsdp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    packing = data.draw(st.booleans())
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    batch = {"input_ids": torch.zeros_like(mask), "attention_mask": mask}
    fewest = length
    if packing:  # packed rows of a process; a process without rows has the first
        fewest = min(sum(lengths[r] for r in own or [0]) for own in shares(rows, fsdp))
    check = TextShares(tokens, fsdp, packing).check
    if tokens > 1 and fewest < tokens:
        with pytest.raises(DataError, match="fewer than the . processes of cp"):
            check(batch)
    else:
        check(batch)
        if tokens > 1:
            zigzag(fewest, tokens)
