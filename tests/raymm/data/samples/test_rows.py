"""Rows of other formats: errors that name the correct form."""

import json
from pathlib import Path

import pytest

from raymm.data import JsonDataset, Sample
from raymm.data.conversations.text import TextEncoder, check_vocabulary
from raymm.data.samples.folders import MediaFolders
from raymm.data.samples.headers import Limits
from raymm.data.samples.row_media import MediaRules, items_of
from raymm.data.samples.rows import RowRules, parse_row
from raymm.errors import DataError, SampleError
from tests.support.sample_files import build_tokenizer


@pytest.mark.parametrize(("row", "parts"), [
    ({"conversations": []}, ["'conversations'", "at least one message"]),
    ({"turns": []}, ["['turns']", "columns: {messages: NAME}"]),
    (
        {"conversations": [{"from": "narrator", "value": "x"}]},
        ["conversations[0]", "'narrator'", "gpt, human"],
    ),
    ({"messages": "hello"}, ["'messages'", "not JSON", "list of messages"]),
    ({"messages": [{"role": "assistant", "content": None}]}, ["messages[0]", "'tool_calls'"]),
    ({"messages": [{"speaker": "x"}]}, ["messages[0]", "'role'", "'speaker'"]),
])
def test_messages_of_other_formats(row, parts):
    with pytest.raises(SampleError) as caught:
        parse_row(row, RowRules(), MediaFolders(Path("/data")))
    assert not [part for part in parts if part not in str(caught.value)], str(caught.value)


@pytest.mark.parametrize("row", [
    {"text": "x" * 11}, {"prompt": "x" * 6, "completion": "y" * 5},
    {"messages": [{"role": "user", "content": "x" * 9}, {"role": "assistant", "content": "y"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 9}]}]},
    {"prompt": "x", "chosen": "y", "rejected": "z" * 9},
])
def test_a_row_with_too_much_text_is_refused(row):
    rules = RowRules(limits=Limits(max_text_characters=10))
    with pytest.raises(SampleError, match=r"above data.max_text_characters \(10\)"):
        parse_row(row, rules, MediaFolders(Path("/data")))
    parse_row(row, RowRules(), MediaFolders(Path("/data")))


@pytest.mark.parametrize("item", [str, lambda value: {"path": value}, lambda value: [value]])
@pytest.mark.parametrize(("value", "parts"), [
    ("ftp://a.b/c.png", ["ftp URL", "not fetched", "download it"]),
    ("https://a.b/c/d.png", ["https://a.b/c/d.png, outside", "media_folders: [https://a.b/c]"]),
    ("s3://bucket/key.png", ["s3://bucket/key.png, outside", "media_folders: [s3://bucket]"]),
    ("http://a.b/c.png", ["'http://a.b/c.png'", "for this machine only"]),
    ("data:image/svg+xml,%3Csvg/%3E", ["data: URI without base64", "base64"]),
    ("data:image/png;base64,iVBO#w0KGgo=", ["invalid base64"]),
    ("aGVsbG8gd29y" * 500, ["not a path", "not base64 of a known format"]),
    ("a\0b.png", ["null character"]),
])
def test_images_that_are_not_files(item, value, parts):
    with pytest.raises(SampleError) as caught:
        items_of(item(value), "images", MediaRules(MediaFolders(Path("/data"))))
    text = str(caught.value)
    assert "'images'" in text and not [part for part in parts if part not in text], text
    assert len(text) < 400


def test_a_text_only_file_with_a_modality(tmp_path):
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "a"}) + "\n")
    with pytest.raises(DataError, match=r"text.jsonl, columns: \{vision: null\}"):
        JsonDataset(file, {"vision": "images"})


def messages(*roles: str) -> Sample:
    return Sample(0, "s", [{"role": role, "content": "a dog"} for role in roles], None, {})


def test_unusual_roles_and_first_assistant_turns():
    tokenizer = build_tokenizer()
    with pytest.raises(SampleError, match=r"\['gpt', 'human'\]\. Rename .*gpt.* to 'assistant'"):
        TextEncoder(tokenizer, 64).encode(messages("human", "gpt"))
    tokenizer.chat_template = "{{ messages[0]['role'] + 1 }}"
    with pytest.raises(SampleError, match="chat template failed"):
        TextEncoder(tokenizer, 64).encode(messages("user", "assistant"))
    tokenizer.chat_template = (
        "{% if not messages %}{{ raise_exception('no messages') }}{% endif %}"
        "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    )
    ids, labels = TextEncoder(tokenizer, 64).encode(messages("assistant", "user"))
    assert labels == [-100, ids[1], -100]  # "a", "doga", "dog"


def test_a_vocabulary_smaller_than_the_tokenizers():
    tokenizer = build_tokenizer()
    size = len(tokenizer)
    check_vocabulary(tokenizer, "folder", size)
    with pytest.raises(DataError, match=rf"'folder' has token ids up to .*for {size // 2} ids"):
        check_vocabulary(tokenizer, "folder", size // 2)
    tokenizer.add_tokens(["<extra>"])  # added tokens may lie beyond, until one is used
    check_vocabulary(tokenizer, "folder", size)
    encoder = TextEncoder(tokenizer, 64, vocabulary=size)
    encoder.encode(Sample(0, "s", None, "a dog", {}))
    with pytest.raises(SampleError, match=f"'<extra>' has the id {size}, .* {size} ids only"):
        encoder.encode(Sample(0, "s", None, "a <extra> dog", {}))
