"""Accepted values of ``data.train`` and ``data.heldout``."""


import pytest
from pydantic import ValidationError

from raymm.config.sections import parse_config
from raymm.data import DataConfig, open_split
from raymm.errors import ConfigError, DataError

FIELDS = {
    "tokenizer": "t", "batch_size": 8, "microbatches": 4,
    "modalities": {"vision": {"column": "images", "processor": "a:b"}},
}


def paths(train):
    config = DataConfig(**FIELDS, train=train)
    # A written configuration can be read again.
    assert DataConfig(**config.model_dump()) == config
    return [(one.path, one.name) for one in config.sources("train")]


def test_a_path_a_source_or_a_list_of_both():
    assert paths("a.jsonl") == [("a.jsonl", None)]
    assert paths({"path": "a.jsonl", "name": "n"}) == [("a.jsonl", "n")]
    assert paths(["a.jsonl", {"path": "b.tar"}]) == [("a.jsonl", None), ("b.tar", None)]
    # Names come from files, and differ.
    same = ["x/train.jsonl", "y/train.jsonl", {"path": "z/train.jsonl", "name": "z"}]
    assert [name for _, name in paths(same)] == ["train-1", "train-2", "z"]
    assert DataConfig(**FIELDS, train="a").sources("heldout") == []


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ([], "train"),
        ("", r"train.0.path"),
        ([{"path": "a", "colour": 1}], r"train.0.colour"),
        ([{"format": "tar"}], r"train.0.path"),
        (["a", {"path": "a", "format": "csv"}], r"train.1.format"),
        ([5], r"train.0"),
        ([{"path": "a", "repeat": 0}], r"train.0.repeat"),
        ([{"path": "a", "repeat": float("inf")}], r"train.0.repeat"),
        ([{"path": "a", "columns": {"vison": "x"}}],
         r"train.0.columns: unknown key 'vison'; accepted: text, messages, .*, id, .*, vision"),
        ([{"path": "a", "columns": {"text": None}}], r"'text' needs the name of a column"),
        ([{"path": "a", "name": "n"}, {"path": "b", "name": "n"}], "two sources have the name 'n'"),
    ],
)
def test_wrong_sources_are_named(train, message):
    with pytest.raises(ValidationError, match=message):
        DataConfig(**FIELDS, train=train)


def test_configuration_errors_list_accepted_values():
    values = {
        "run": {"storage_path": "x", "steps": 1}, "model": {"language_model": {"path": "x"}},
        "data": FIELDS | {"train": [{"path": "a", "colum": {}}], "modalities": {}},
    }
    message = (
        r"data.train.0.colum: unknown key; did you mean data.train.0.columns.*"
        "accepted: columns, format, ignore_columns, name, path, repeat"
    )
    with pytest.raises(ConfigError, match=message):
        parse_config(values)


@pytest.mark.parametrize("name", ["max_image_pixels", "max_audio_samples", "max_item_bytes"])
def test_limits_are_positive_and_reach_the_readers(make_config, name):
    with pytest.raises(ValidationError, match=name):
        DataConfig(**FIELDS, train="a", **{name: 0})
    dataset = open_split(make_config(**{name: 7}), "train")
    assert getattr(dataset.options.limits, name) == 7


def test_duplicate_source_names_are_refused(make_config, tmp_path):
    config = make_config()
    sources = [{"path": str(tmp_path / "train.jsonl"), "name": "x"}] * 2
    with pytest.raises(DataError, match="two sources are named 'x'"):
        open_split(config.model_copy(update={"train": sources}), "train")


def test_a_modality_may_not_take_a_text_columns_name():
    with pytest.raises(ValidationError, match="'messages'"):
        DataConfig(**FIELDS | {"modalities": {"messages": FIELDS["modalities"]["vision"]}},
                   train="a")
