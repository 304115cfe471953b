"""Tar shards: members of a sample, broken shards, and shards that are refused."""

import tarfile

import pytest

from raymm.data.readers import ReaderOptions, TarDataset
from raymm.errors import DataError, SampleError
from tests.support.same_rows import add_member


def shard(folder, members):
    with tarfile.open(folder / "s.tar", "w") as out:
        for name, content in members:
            add_member(out, name, content)
    return folder / "s.tar"


def test_members_of_one_key_are_one_sample(tmp_path):
    path = shard(
        tmp_path,
        [
            ("a/1.x.png", b"1"), ("a/1.json", b'{"text": "one", "w": "p.png"}'), ("a/1.jpg", b"22"),
            ("b/1.txt", b"two"), ("b/1.png", b"333"),
            (".hidden", b""), ("README", b""),
            ("c/1.txt", b"three"),
        ],
    )
    columns = {"seg": "x.png", "vision": "jpg;png", "named": "w"}
    dataset = TarDataset(path, columns)
    assert [sample.id for sample in dataset] == [f"{path}[{k}/1]" for k in "abc"]
    assert [sample.text for sample in dataset] == ["one", "two", "three"]
    assert {k: v.tolist() for k, v in dataset.counts.items()} == {
        "seg": [1, 0, 0], "vision": [1, 1, 0], "named": [1, 0, 0],
    }
    (picture,) = dataset[1].media["vision"]
    assert picture.name == "b/1.png" and picture.size == 3
    assert dataset[0].media["named"] == (str(tmp_path / "p.png"),)
    assert path.read_bytes()[picture.start :][:3] == b"333"


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.png", b"")], r"s.tar\[1\]: a sample needs 'messages' \(or"),
        ([("1.json", b"[]")], "must be a JSON object, got list"),
        ([("1.json", b"{")], "is not json"),
        ([("1.txt", b"\xff")], "is not txt"),
        ([("1.txt", b"a"), ("1.txt", b"b")], "two members"),
        ([("1.txt", b"a"), ("1.json", b'{"png": "x"}'), ("1.png", b"")], "'json'"),
    ],
)
def test_bad_shards_are_named_or_skipped(tmp_path, members, message):
    path = shard(tmp_path, [("0.txt", b"good"), ("0.png", b""), *members])
    with pytest.raises(DataError, match=message):
        TarDataset(path, {"vision": "png"})
    dataset = TarDataset(path, {"vision": "png"}, ReaderOptions(skip=True))
    assert len(dataset) == 2 and dataset.counts["vision"].tolist() == [1, 0]
    assert dataset[0].text == "good"
    with pytest.raises(SampleError, match=message.removeprefix(r"s.tar\[1\]: ")):
        dataset[1]


def test_compressed_shards_are_refused_with_advice(tmp_path):
    with tarfile.open(tmp_path / "s.tar", "w:gz") as out:
        add_member(out, "1.txt", b"a")
    with pytest.raises(DataError, match="s.tar.*unpacked first"):
        TarDataset(tmp_path / "s.tar")


def test_large_text_members_are_refused_unread(tmp_path, monkeypatch):
    monkeypatch.setattr("raymm.data.readers.tar_shards.MAX_TEXT_BYTES", 10)
    path = shard(tmp_path, [("1.txt", b"a" * 10), ("2.txt", b"a" * 11)])
    with pytest.raises(DataError, match=r"s.tar\[2\]: it has 11 bytes, above 10"):
        TarDataset(path)
