"""Samples of each process."""


import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.sharding.sample_rows import count_items, shares, take_items, take_rows
from raymm.errors import ModelError

counts, processes = st.integers(0, 9), st.integers(1, 5)


@given(counts, processes)
def test_every_sample_is_one_processs(count, n):
    dealt = shares(count, n)
    assert [sample for share in dealt for sample in share] == list(range(count))
    assert len(dealt) == n and max(map(len, dealt)) - min(map(len, dealt)) <= 1


def merged(rows: int) -> dict[str, torch.Tensor]:
    def numbered(*shape: int, dim: int) -> torch.Tensor:
        view = [1] * len(shape)
        view[dim] = rows
        return torch.arange(rows).view(view).expand(shape).clone()

    return {
        "inputs_embeds": numbered(rows, 4, 6, dim=0), "targets": numbered(rows, 4, dim=0),
        "attention_mask": numbered(rows, 1, 4, 4, dim=0),
        "position_ids": numbered(3, rows, 4, dim=1),
        "token_layout": numbered(3, rows, 4, dim=1), "token_type_ids": torch.zeros(1, 4),
    }  # fmt: skip


@given(st.integers(1, 9), processes)
def test_rows_of_everything(rows, n):
    parts = [take_rows(merged(rows), place, n) for place in range(n)]
    own = [part for part, share in zip(parts, shares(rows, n), strict=True) if share]
    for name, dim in {"inputs_embeds": 0, "targets": 0, "attention_mask": 0,
                      "position_ids": 1, "token_layout": 1}.items():  # fmt: skip
        assert torch.equal(torch.cat([part[name] for part in own], dim), merged(rows)[name])
    alike = take_rows({**merged(rows), "position_ids": torch.arange(4)}, 0, n)
    assert alike["position_ids"].tolist() == [0, 1, 2, 3]
    for part, share in zip(parts, shares(rows, n), strict=True):
        assert part["token_type_ids"].shape == (1, 4)  # one row for all
        if not share:
            assert (part["targets"] == -100).all() and (part["inputs_embeds"] == 0).all()
            assert part["targets"].shape == (1, 4)


def test_inputs_that_cannot_be_sharded_are_named():
    with pytest.raises(ModelError, match=r"returned \['pixel_mask'\]"):
        take_rows({**merged(2), "pixel_mask": torch.zeros(2)}, 0, 2)
    with pytest.raises(ModelError, match="attention_mask .* 5 rows .* has 3"):
        take_rows({**merged(3), "attention_mask": torch.zeros(5, 4)}, 0, 2)
    patches = {"pixel_values": torch.zeros(64, 12), "grid_thw": torch.ones(2, 3)}
    with pytest.raises(ModelError, match=r"'vision' gets pixel_values \(64, 12\), grid_thw"):
        count_items(patches, "vision")


@given(st.integers(1, 6), processes)
def test_items_of_every_tensor(count, n):
    inputs = {"pixel_values": torch.arange(count * 2).view(count, 2), "scale": 3,
              "mask": torch.arange(count), "factor": torch.tensor(2.0)}  # fmt: skip
    assert count_items(inputs, "vision") == count
    for share in shares(count, n):
        part = take_items(inputs, share)
        assert part["mask"].tolist() == (list(share) or [0])
        assert torch.equal(part["pixel_values"], inputs["pixel_values"][part["mask"]])
        assert part["scale"] == 3 and part["factor"] == 2
