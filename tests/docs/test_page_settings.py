"""YAML on pages is a valid part of a configuration, and the reference describes every field."""

import copy
import dataclasses
import re

import pytest
from transformers import TrainingArguments

from docs import reference
from raymm.config.sections import TrainConfig, parse_config
from raymm.errors import ConfigError
from raymm.files.config_file import parse_yaml
from tests.docs.pages import ROOT, blocks

# Completion of a part of a configuration on a page.
WHOLE = {
    "run": {"storage_path": "runs/x", "steps": 10},
    "model": {
        "language_model": {"path": "models/llm"},
        "encoders": {name: {"path": f"models/{name}"} for name in ("vision", "audio")},
    },
    "data": {
        "train": "train.jsonl", "tokenizer": "models/llm", "batch_size": 8, "microbatches": 4,
        "modalities": {
            name: {"column": name, "processor": f"models/{name}"} for name in ("vision", "audio")
        },
    },
}
BLOCKS = [block for block in blocks("yaml") if not block.skipped]


def completed(part, whole):
    """Return a part with the missing sections; given encoders and sources are not completed."""
    if not isinstance(part, dict) or not isinstance(whole, dict):
        return part
    if {"path", "config", "factory"} & set(part):
        return part
    return {**whole, **{key: completed(part[key], whole.get(key)) for key in part}}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_settings_are_accepted(block):
    part = parse_yaml(block.text, str(block))
    assert set(part) <= set(TrainConfig.model_fields)
    whole = copy.deepcopy(WHOLE)
    if "path" in part.get("model", {}):  # a VLM's processor has its own kinds of items
        del whole["data"]["modalities"]
    parse_config(completed(part, whole))


def test_a_wrong_setting_is_noticed():
    with pytest.raises(ConfigError, match="data.batching.alikes: unknown key"):
        parse_config(completed({"data": {"batching": {"alikes": 1}}}, copy.deepcopy(WHOLE)))


def test_the_data_page_has_four_sources():
    ignored, *configs = [
        parse_config(completed(parse_yaml(block.text, ""), copy.deepcopy(WHOLE)))
        for block in BLOCKS if block.page == "docs/own-data.md"
    ]
    assert ignored.data.ignore_columns == ["source", "license"]
    sources = configs[0].data.sources("train")
    assert [source.name for source in sources] == [None, "laion", None, None]
    assert configs[0].data.limits.max_image_pixels == 50_000_000
    by_url = [source.path.partition(":")[0] for source in configs[1].data.sources("train")]
    assert by_url == ["s3", "s3", "gs", "https", "hf"]
    assert configs[2].data.batching.rebalance.every == 50


def columns(title: str) -> tuple[set[str], set[str]]:
    """Return the names in the first and second column of a table of docs/migration.md."""
    page = (ROOT / "docs" / "migration.md").read_text()
    table = page.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.M)
    first, second = (
        set(re.findall(r"`([\w.]+)`", " ".join(cells))) for cells in zip(*rows, strict=True)
    )
    return first, second


@pytest.mark.parametrize("title", ["From transformers' Trainer", "From LLaMA-Factory"])
def test_counterparts_of_other_trainers_are_fields(title):
    fields = set(TrainConfig.model_fields) | {
        f"{path}.{name}" for section, paths in reference.sections(TrainConfig).items()
        for path in paths for name in section.model_fields
    }
    first, second = columns(title)
    assert len(second) > 10 and second - fields == set()
    if "transformers" in title:
        theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
        assert first - theirs - {"TrainingArguments"} == set()


def test_the_reference_has_every_field():
    page = reference.configuration_page()
    found = reference.sections(TrainConfig)
    assert len(found) > 10
    for section, paths in found.items():
        part = page.split(f"## {', '.join(paths)}\n")[1].split("\n## ")[0]
        for name in section.model_fields:
            row = next(line for line in part.splitlines() if line.startswith(f"| `{name}` |"))
            assert all(cell.strip() for cell in row.replace("\\|", "").split("|")[1:3]), row
            assert len(row.split("|")[-2].strip()) > 3, row


def test_an_undescribed_field_fails_the_build():
    class Silent(reference.BaseModel):
        """Section without descriptions."""

        name: int = 1

    with pytest.raises(LookupError, match="Silent.name"):
        reference.description(Silent, "name")
