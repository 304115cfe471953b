"""Missing files and folders of a configuration are named with their field."""

import json

import pytest

from raymm.config.check_files import check_files
from raymm.config.sections import parse_config
from raymm.errors import ConfigError


@pytest.fixture
def values(tmp_path):
    """Return the values of a configuration whose files all exist."""
    for name in ("llm", "vision", "tokens", "processor"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for name in ("rows.jsonl", "plan.json", "profile.json"):
        (tmp_path / name).write_text("{}\n")
    return {
        "run": {"storage_path": str(tmp_path / "run"), "steps": 1},
        "model": {
            "language_model": {"path": str(tmp_path / "llm")},
            "encoders": {"vision": {"path": str(tmp_path / "vision")}},
        },
        "data": {
            "train": str(tmp_path / "rows.jsonl"), "tokenizer": str(tmp_path / "tokens"),
            "modalities": {"vision": {"processor": str(tmp_path / "processor")}},
            "batch_size": 1, "microbatches": 1,
        },
    }


def test_existing_files_are_accepted(values, tmp_path):
    check_files(parse_config(values), with_data=True)
    check_files(parse_config({**values, "parallel": {"plan": str(tmp_path / "plan.json")}}))


@pytest.mark.parametrize(("path", "section", "key", "expected"), [
    ("llm", ("model", "language_model"), "path", "model.language_model: path is .*does not exist"),
    ("none", ("model", "encoders", "vision"), "path", "model.encoders.vision: path is"),
    ("none", ("data",), "tokenizer", "data.tokenizer: .* is not a local folder"),
    ("no.jsonl", ("data",), "train", "data.train: data file .*no.jsonl' does not exist"),
    ("no.json", ("parallel",), "plan", "parallel.plan is .*there is no such file"),
    ("no.json", ("planning",), "profile", "planning.profile is .*there is no such file"),
])
def test_a_missing_file_is_named_with_its_field(values, tmp_path, path, section, key, expected):
    below = values
    for name in section:
        below = below.setdefault(name, {})
    below[key] = str(tmp_path / "absent" / path)
    with pytest.raises(ConfigError, match=expected):
        check_files(parse_config(values), with_data=True)


def test_a_folder_without_a_model_is_told_apart_from_a_missing_one(values, tmp_path):
    (tmp_path / "llm" / "config.json").unlink()
    with pytest.raises(ConfigError, match="which has no config.json"):
        check_files(parse_config(values))


def test_data_are_checked_on_request_only(values, tmp_path):
    (tmp_path / "rows.jsonl").unlink()
    check_files(parse_config(values))
    with pytest.raises(ConfigError, match="data.train"):
        check_files(parse_config(values), with_data=True)


def test_rows_that_may_be_a_data_set_of_the_hub_have_a_hint(values):
    values["data"]["train"] = "org/name"
    with pytest.raises(ConfigError, match="a data set of the hub is hf://datasets/org/name|org/name"):
        check_files(parse_config(values), with_data=True)
