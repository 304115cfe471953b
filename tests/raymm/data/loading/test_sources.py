"""``data.heldout_fraction``: every row is always trained on, or always evaluated on."""

import json

import pytest
from pydantic import ValidationError

from raymm.data import DataConfig, open_split
from raymm.errors import DataError


def config(tmp_path, rows=(40, 10), **changes):
    sources = []
    for number, count in enumerate(rows):
        file = tmp_path / f"source-{number}.jsonl"
        file.write_text("".join(
            json.dumps({"id": f"{number}-{row}", "text": "a"}) + "\n" for row in range(count)
        ))
        sources.append({"path": str(file), **changes.pop(f"source_{number}", {})})
    values = {"train": sources, "tokenizer": "x", "batch_size": 1, "microbatches": 1}
    return DataConfig.model_validate({**values, "heldout_fraction": 0.2, **changes})


def ids(data, split):
    rows = open_split(data, split)
    return [rows[index].id for index in range(len(rows))]


def test_every_row_is_in_one_of_the_splits(tmp_path):
    data = config(tmp_path)
    train, heldout = ids(data, "train"), ids(data, "heldout")
    assert len(train) == 40 and len(heldout) == 10 and len({*train, *heldout}) == 50
    assert sum(name.startswith("1-") for name in heldout) == 2  # the fraction of each source


def test_the_split_follows_from_the_seed_alone(tmp_path):
    heldout = ids(config(tmp_path), "heldout")
    again = DataConfig.model_validate(config(tmp_path).model_dump())
    assert ids(again, "heldout") == heldout != ids(config(tmp_path, seed=1), "heldout")


def test_repeated_rows_are_not_evaluated_on(tmp_path):
    data = config(tmp_path, source_0={"repeat": 2.0}, source_1={"repeat": 0.5})
    train, heldout = ids(data, "train"), ids(data, "heldout")
    assert len(train) == 2 * 32 + 4 and len(heldout) == 10 and not {*train} & {*heldout}


def test_one_row_cannot_be_split(tmp_path):
    with pytest.raises(DataError, match="heldout_fraction is 0.2.*has 1 row"):
        open_split(config(tmp_path, (1,)), "heldout")


def test_rows_are_held_out_in_one_way(tmp_path):
    with pytest.raises(ValidationError, match="heldout and heldout_fraction are both given"):
        config(tmp_path, heldout="other.jsonl")
