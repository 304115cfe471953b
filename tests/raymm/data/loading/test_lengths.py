"""Tokens of every row, for the choice of ``max_length``."""

from __future__ import annotations

import json

import numpy as np
import pytest

from raymm.data import DataConfig, local_steps, open_split, row_lengths, truncation_note
from raymm.errors import SampleError
from tests.support.tiny_folders import modalities, tiny


def configured(kind, data=None, **changes):
    folder, own = tiny(kind)
    return DataConfig.model_validate({
        "train": str(data or own), "processor": folder,
        "modalities": {} if data else modalities(kind), "batch_size": 1, "microbatches": 1,
        **changes,
    })


def texts(tmp_path, *answers):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": [
        {"role": "user", "content": "Say"}, {"role": "assistant", "content": answer},
    ]}) + "\n" for answer in answers))
    return file


def test_lengths_are_those_of_microbatches(tmp_path):
    config = configured("gemma3")
    dataset = open_split(config, "train")
    lengths = row_lengths(config, dataset, cache=tmp_path)
    found = {meta.sample_ids[0]: meta.tokens for step in local_steps(config, steps=len(dataset))
             for meta in step.meta}  # fmt: skip
    assert lengths.tolist() == [found[dataset[i].id] for i in range(len(dataset))]


def test_the_longest_row_is_found_behind_many_short_ones(tmp_path):
    file = texts(tmp_path, *["Hello."] * 64, "A red circle. Then " * 60)
    config = configured("gemma3", file, max_length=16)
    lengths = row_lengths(config, open_split(config, "train"), cache=tmp_path / "cache")
    assert len(lengths) == 65 and lengths[-1] > 10 * lengths[:64].max()


def test_lengths_are_cached_for_every_max_length(tmp_path):
    file = texts(tmp_path, "Hello.", "A red circle.")
    config = configured("gemma3", file)
    dataset = open_split(config, "train")
    first = row_lengths(config, dataset, cache=tmp_path / "cache")
    (stored,) = (tmp_path / "cache").iterdir()
    made, seen = stored.stat().st_mtime_ns, []
    other = config.model_copy(update={"max_length": 8})
    again = row_lengths(other, dataset, lambda *done: seen.append(done), tmp_path / "cache")
    assert (first == again).all() and seen == [(2, 2)] and stored.stat().st_mtime_ns == made


def test_lengths_are_the_same_in_worker_processes(tmp_path):
    config = configured("gemma3")
    dataset = open_split(config, "train")
    alone = row_lengths(config, dataset, cache=tmp_path / "one", workers=1)
    shared = row_lengths(config, dataset, cache=tmp_path / "two", workers=2)
    assert np.array_equal(alone, shared)


def test_a_row_that_cannot_be_used_is_named_or_zero(tmp_path):
    file = texts(tmp_path, "Hello.", "")
    file.write_text(file.read_text() + json.dumps({"messages": [
        {"role": "user", "content": "Say"}]}) + "\n")  # fmt: skip
    config = configured("gemma3", file)
    with pytest.raises(SampleError, match="no label"):
        row_lengths(config, open_split(config, "train"), cache=tmp_path / "cache")
    config = configured("gemma3", file, on_error="skip")
    lengths = row_lengths(config, open_split(config, "train"), cache=tmp_path / "cache")
    assert lengths[0] > 0 and lengths[2] == 0


def test_rows_that_are_cut_are_counted_and_reported(tmp_path):
    file = texts(tmp_path, "Hello.", "A red circle. Then " * 60, "Hello.", "A blue square. " * 50)
    config = configured("gemma3", file, max_length=32, batch_size=4, microbatches=2)
    dataset = open_split(config, "train")
    (step,) = local_steps(config, steps=1)
    assert sum(meta.truncated for meta in step.meta) == 2
    longest = row_lengths(config, dataset, cache=tmp_path / "all").max()
    for cache in ("all", "none"):
        note = truncation_note(config, dataset, tmp_path / cache)
        assert note is not None
        assert note.startswith(
            f"2 of 4 rows have more tokens than data.max_length (32), the longest {longest}"
        )
    whole = config.model_copy(update={"max_length": int(longest)})
    assert truncation_note(whole, dataset, tmp_path / "all") is None
    (step,) = local_steps(whole, steps=1)
    assert sum(meta.truncated for meta in step.meta) == 0


def test_rows_of_models_by_parts_that_are_cut_are_counted(tmp_path):
    file = texts(tmp_path, "Hello.", "A red circle. Then " * 60)
    config = DataConfig.model_validate({
        "train": str(file), "tokenizer": tiny("gemma3")[0], "batch_size": 2, "microbatches": 1,
        "max_length": 32,
    })
    (step,) = local_steps(config, steps=1)
    assert [meta.truncated for meta in step.meta] == [1]
    note = truncation_note(config, open_split(config, "train"), tmp_path / "cache")
    assert note is not None and note.startswith("1 of 2 rows have more tokens")


def test_a_cut_within_an_item_is_an_error_of_the_row(tmp_path):
    config = configured("gemma3", max_length=6, shuffle=False)
    with pytest.raises(SampleError, match=r"exceed max_length \(6\).*tokens of its items"):
        list(local_steps(config, steps=1))
