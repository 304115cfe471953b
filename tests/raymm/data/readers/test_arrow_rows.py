"""Columns of Arrow tables: those that are read, items per row, and limits of a row."""

import pyarrow as pa
import pytest

from raymm.data.readers import ReaderOptions
from raymm.data.readers.arrow_rows import count_column, plan_columns, row_of, without_nulls
from raymm.data.samples.headers import Limits
from raymm.errors import DataError, SampleError

PARTS = pa.list_(pa.struct({"role": pa.string(), "content": pa.list_(pa.struct({
    "type": pa.string(), "text": pa.string()}))}))
TURNS = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))


def plan(schema, **options):
    return plan_columns(pa.schema(schema), ReaderOptions(**options), "x.parquet")


def test_only_columns_of_the_form_and_of_modalities_are_read():
    columns = {
        "size": pa.int64(), "text": pa.string(), "pictures": pa.list_(pa.string()),
        "id": pa.string(),
    }
    planned = plan(columns, columns={"vision": "pictures"})
    assert planned.used == ["text", "pictures", "id"] and planned.text == ["text", "id"]
    assert planned.media == {"pictures": "vision"} and planned.unused == ["size"]
    assert planned.forms == ["text"] and not planned.scan and planned.frames == []
    nested = plan(columns | {"pictures": pa.list_(pa.list_(pa.string()))},
                  columns={"vision": "pictures"})
    assert nested.frames == ["pictures"]


@pytest.mark.parametrize(("columns", "is_scanned"), [
    ({"text": pa.string()}, False),
    ({"messages": TURNS}, False),
    ({"messages": PARTS}, True),
    ({"messages": pa.string()}, True),  # JSON
    ({"messages": TURNS, "text": pa.string()}, True),  # two row forms
])
def test_text_is_read_if_it_may_hold_media_or_decides_the_form(columns, is_scanned):
    assert plan(columns).scan is is_scanned


def test_missing_columns_are_named_with_those_of_the_file():
    with pytest.raises(DataError, match=r"x.parquet needs columns .*'text'.*\['caption'\]"):
        plan({"caption": pa.string()})
    assert plan({"caption": pa.string()}, text_columns={"text": "caption"}).text == ["caption"]


@pytest.mark.parametrize(("values", "frames", "counts"), [
    (pa.array(["a", "", None]), False, [1, 0, 0]),
    (pa.array([b"a", b"", None]), False, [1, 1, 0]),
    (pa.array([{"path": "a"}, None]), False, [1, 0]),
    (pa.array([["a", "b"], [], None]), False, [2, 0, 0]),
    (pa.array([["a", "b"], [], None]), True, [1, 0, 0]),
    (pa.array([[["a"], ["b", "c"]], []]), True, [2, 0]),
    (pa.array([None, None]), False, [0, 0]),
])
def test_items_are_counted_by_lengths(values, frames, counts):
    assert count_column(values, "media", frames).tolist() == counts


def test_columns_of_numbers_hold_no_media():
    with pytest.raises(DataError, match="column 'media' is of type int64, which holds no paths"):
        count_column(pa.array([1]), "media", False)


@pytest.mark.parametrize("value", ["x" * 11, b"x" * 11, ["a", "x" * 11], [{"bytes": b"x" * 11}]])
def test_a_long_value_is_refused_at_any_depth(value):
    table = pa.table({"text": ["a", "b"], "media": [None, value]})
    limits = Limits(max_item_bytes=10)
    assert row_of(table, 0, limits)["text"] == "a"
    with pytest.raises(SampleError, match=r"11 bytes, above data.max_item_bytes \(10\)") as caught:
        row_of(table, 1, limits)
    assert caught.value.column == "media"


def test_fields_that_a_row_lacks_are_removed():
    row = {"a": None, "b": [{"text": None, "type": "image"}, None], "c": 0}
    assert without_nulls(row) == {"b": [{"type": "image"}, None], "c": 0}
