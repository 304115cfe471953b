import json
import pickle

import pytest

from raymm.data import JsonDataset
from raymm.data.readers import ReaderOptions
from raymm.errors import DataError

ROWS = [
    {"id": 7, "text": "né à Orléans", "images": "sub/a.png"},
    {"text": "日本", "images": ["/abs/b.png", "c.png"]},
    {"messages": [{"role": "user", "content": "hi [,]"}], "images": None},
]


def write(path, rows=ROWS, bom=""):
    if path.suffix == ".jsonl":
        body = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    else:
        body = "\n " + json.dumps(rows, ensure_ascii=False, indent=1) + "\n"
    path.write_text(bom + body, encoding="utf-8")
    return path


@pytest.mark.parametrize("bom", ["", "\ufeff"])
@pytest.mark.parametrize("name", ["d.jsonl", "d.json"])
def test_rows_are_found_by_offset(tmp_path, name, bom):
    options = ReaderOptions(media_folders=("/abs",))
    dataset = JsonDataset(write(tmp_path / name, bom=bom), {"vision": "images"}, options)
    dataset = pickle.loads(pickle.dumps(dataset))
    assert len(dataset) == 3
    assert dataset.counts["vision"].tolist() == [1, 2, 0]
    first, second, third = dataset[0], dataset[1], dataset[-1]
    assert (first.id, first.text) == ("7", "né à Orléans")
    assert first.media == {"vision": (str(tmp_path / "sub/a.png"),)}
    assert second.text == "日本"
    assert second.media == {"vision": ("/abs/b.png", str(tmp_path / "c.png"))}
    assert second.id.endswith("d.jsonl:3" if name == "d.jsonl" else "d.json[1]")
    assert third.messages == ROWS[2]["messages"] and third.media == {}
    with pytest.raises(IndexError):
        dataset[3]


def test_missing_file(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl.*does not exist"):
        JsonDataset(tmp_path / "nowhere.jsonl")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r":3: the line is not JSON"),
        ("[1]", r":3: a sample is a JSON object"),
        (
            '{"caption": "a"}',
            r":3: a sample needs 'messages' \(or .*'text'\); it has \['caption'\]",
        ),
        ('{"text": "a", "messages": []}', r":3: 'messages' must be a list with"),
        ('{"text": 5}', r":3: 'text' must be a string"),
        ('{"messages": [{"role": "user"}]}', r":3: messages\[0\] needs a string 'content'"),
        ('{"text": "a", "images": [3]}', r":3: column 'images' must be a path"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    path = tmp_path / "d.jsonl"
    path.write_text('{"text": "ok", "images": null}\n\n' + line + "\n")
    with pytest.raises(DataError, match="d.jsonl" + message):
        JsonDataset(path, {"vision": "images"})


@pytest.mark.parametrize("body", ['[{"text": "a"} {"text": "b"}]', '[{"text": "a"}', '[{"text": '])
def test_torn_arrays(tmp_path, body):
    path = tmp_path / "d.json"
    path.write_text(body)
    with pytest.raises(DataError, match="d.json"):
        JsonDataset(path)


def test_no_samples(tmp_path):
    for body in ("", "[]", " [ ] "):
        path = tmp_path / "d.json"
        path.write_text(body)
        with pytest.raises(DataError, match="no samples"):
            JsonDataset(path)


def test_a_column_no_row_has_is_an_error_that_lists_the_columns(tmp_path):
    path = write(tmp_path / "d.jsonl")
    with pytest.raises(DataError, match=r"'image' \(modality 'vision'\).*'images', 'messages'"):
        JsonDataset(path, {"vision": "image"})


def test_a_file_changed_underneath(tmp_path):
    path = write(tmp_path / "d.jsonl")
    dataset = JsonDataset(path)
    path.write_text("{}\n" * 50)
    with pytest.raises(DataError, match="changed"):
        dataset[0]
