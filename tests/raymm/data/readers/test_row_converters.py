"""Rows that a user's function converts, in every format of files."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raymm.data import DataConfig, open_split
from raymm.errors import ConfigError, DataError

ROWS = [
    {"id": f"r{n}", "question": {"en": f"what {n}"}, "answers": [f"yes {n}", "no"], "votes": n}
    for n in range(3)
]
MESSAGES = [
    [{"role": "user", "content": f"what {n}"}, {"role": "assistant", "content": f"yes {n}"}]
    for n in range(3)
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path / "cache"))


def write(path, rows=ROWS):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(path, form="tests.support.row_converters:turns", **more):
    return DataConfig(
        train=str(path), tokenizer="none", batch_size=1, microbatches=1, row_form=form, **more
    )


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_samples_are_those_of_the_converted_rows(tmp_path, name):
    dataset = open_split(config(write(tmp_path / name)), "train")
    assert [dataset[n].messages for n in range(3)] == MESSAGES
    assert [dataset[n].id for n in range(3)] == ["r0", "r1", "r2"]


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
@pytest.mark.parametrize(("form", "says"), [
    ("nothing",
     "data.row_form 'tests.support.row_converters:nothing' returned NoneType; accepted: a dict"),
    ("with_column", "'source'"),
])  # fmt: skip
def test_results_that_cannot_be_used_are_named(tmp_path, name, form, says):
    with pytest.raises(DataError) as error:
        open_split(config(write(tmp_path / name), f"tests.support.row_converters:{form}"), "train")
    assert says in str(error.value)


def test_an_error_of_the_function_names_the_row(tmp_path):
    path = write(tmp_path / "d.jsonl", [*ROWS, {"id": "r3", "question": None}])
    with pytest.raises(DataError, match="d.jsonl:4.*row_converters:turns' raised TypeError"):
        open_split(config(path), "train")


def test_a_column_of_media_is_not_made_by_the_function(tmp_path):
    media = {"image": {"column": "images", "processor": "tests.support.run_processors:image"}}
    with pytest.raises(DataError, match="returned 'images', which data.modalities reads"):
        open_split(
            config(write(tmp_path / "d.jsonl"), "tests.support.row_converters:with_media",
                modalities=media),
            "train",
        )


@pytest.mark.parametrize(("form", "error", "says"), [
    ("tests.support.row_converters:absent", ConfigError,
     "data.row_form is 'tests.support.row_converters:absent'"),
    ("alpacas", ValueError, "row form 'alpacas' is not known; accepted: messages, conversations"),
])  # fmt: skip
def test_unknown_functions_and_forms_are_named(tmp_path, form, error, says):
    with pytest.raises(error, match=says) as raised:
        open_split(config(write(tmp_path / "d.jsonl"), form), "train")
    assert "module:function, which returns a row of one of these forms" in str(raised.value)
