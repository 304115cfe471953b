"""Sizes of all samples: correct, independent of the number of workers, and cached safely."""

import json
import os
import zipfile

import numpy as np
import pytest

from raymm.data import StepBuilder, local_steps, open_split, scan
from raymm.data.sampling.scanner import (
    SampleScan,
    _fingerprint,
    default_cache,
    load_scan,
    save_scan,
    scan_key,
)
from raymm.errors import SampleError
from tests.support.same_rows import write_parquet, write_shards
from tests.support.sample_files import build_tokenizer, write_image


def arrays(found):
    return {"tokens": found.text_tokens, "sources": found.sources, "bad": found.unusable,
            **found.counts, **{f"{k} items": v for k, v in found.items.items()}}


def assert_equal(got, want):
    assert got.reasons == want.reasons and got.source_names == want.source_names
    assert arrays(got).keys() == arrays(want).keys()
    for name, array in arrays(got).items():
        np.testing.assert_array_equal(array, arrays(want)[name], err_msg=name)
        assert array.dtype == np.int64


def test_sizes_are_those_of_the_built_samples(make_config):
    config = make_config(shuffle=False, batch_size=1, microbatches=1)
    seen = []
    found = scan(open_split(config, "train"), config, progress=lambda *one: seen.append(one))
    assert seen == [(20, 20)] and len(found) == 20
    for index, step in enumerate(local_steps(config, steps=20)):
        (meta,) = step.meta
        assert found.text_tokens[index] == meta.tokens
        for name, counts in found.counts.items():
            assert counts[index] == len(meta.items.get(name, ()))
    assert found.items["vision"].tolist() == [[12, 9, 1]] * 16  # 3 of 5 rows, one of them two
    assert found.items["audio"].tolist() == [[400, 16_000, 1]] * 8
    np.testing.assert_allclose(found.seconds("audio"), 400 / 16_000)


def test_sizes_for_planning_take_units_and_sources(make_config, tmp_path):
    config = make_config(
        train=[str(tmp_path / "train.jsonl"), {"path": str(write_parquet(tmp_path, 10))}]
    )
    found = scan(open_split(config, "train"), config)
    plain = found.sizes()
    assert plain.names == ("vision", "audio", "text") and plain.padded == ("text",)
    assert plain.values[:5, 0].tolist() == [0, 1, 0, 1, 2]
    assert plain.sources.tolist() == [0] * 20 + [1] * 10
    assert found.source_names == ("train", "parquet")
    units = {"vision": lambda items: -(-items[:, 0] // 4) * -(-items[:, 1] // 4)}
    assert found.sizes(units).values[:5, 0].tolist() == [0, 9, 0, 9, 18]
    np.testing.assert_array_equal(found.sizes(units).values[:, 1:], plain.values[:, 1:])


def test_items_of_frames_and_of_other_kinds(make_config, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(3))
    rows = [{"text": "a cat", "images": ["i.png", "i.png"]}, {"text": "a cat", "audio": "x.npy"},
            {"text": "a cat", "images": [["i.png"], ["i.png"] * 3]}]
    config = make_config(count=1)
    write_image(tmp_path / "i.png", 0)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.modalities["vision"].frames = True
    found = scan(open_split(config, "train"), config)
    assert found.counts["vision"].tolist() == [1, 0, 2]
    assert found.items["vision"].tolist() == [[12, 9, 2], [12, 9, 1], [12, 9, 3]]
    assert found.items["audio"].tolist() == [[0, 0, 0]]


def test_unusable_samples_are_errors_or_counted(make_config, tmp_path):
    config = make_config(on_error="skip")
    (tmp_path / "i1.png").unlink()
    (tmp_path / "a7.wav").write_bytes(b"")
    found = scan(open_split(config, "train"), config)
    assert found.unusable.tolist() == [1, 7]
    assert "i1.png: the file does not exist" in found.reasons[0]
    assert "column 'audio'" in found.reasons[1] and "the file is empty" in found.reasons[1]
    assert found.sizes().values[[1, 7]].tolist() == [[0, 0, 0]] * 2
    skipped = StepBuilder(config, open_split(config, "train")).build(range(20)).skipped
    assert {one.id for one in skipped} == {"s1", "s7"}
    strict = config.model_copy(update={"on_error": "raise"})
    with pytest.raises(SampleError, match="'s1'"):
        scan(open_split(strict, "train"), strict)


def test_workers_find_the_same_and_report_progress(make_config, tmp_path, monkeypatch):
    config = make_config(
        count=40, on_error="skip",
        train=[str(tmp_path / "train.jsonl"),
               {"path": str(write_shards(tmp_path, 30)),
                "columns": {"vision": "*.png", "audio": "wav"}}],
    )
    make_config(count=40)
    (tmp_path / "i3.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    monkeypatch.setattr("raymm.data.sampling.scanner._CHUNK", 16)
    dataset, seen = open_split(config, "train"), []
    found = scan(dataset, config, workers=2, progress=lambda *one: seen.append(one))
    assert seen == [(16, 70), (32, 70), (48, 70), (64, 70), (70, 70)]
    assert found.unusable.tolist() == [3]
    assert_equal(found, scan(dataset, config, workers=1))
    strict = config.model_copy(update={"on_error": "raise"})
    with pytest.raises(SampleError, match=r"'s3'.*i3.png"):
        scan(dataset, strict, workers=1)


@pytest.fixture
def cached(make_config, tmp_path):
    config = make_config(on_error="skip")
    (tmp_path / "i1.png").unlink()
    dataset = open_split(config, "train")
    found = scan(dataset, config, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    return config, dataset, found, file


def test_a_cached_scan_is_used(cached, monkeypatch):
    config, dataset, found, file = cached
    # A call would raise a TypeError.
    monkeypatch.setattr("raymm.data.sampling.scanner._Scanner", None)
    seen = []
    again = scan(dataset, config, cache=file.parent, progress=lambda *one: seen.append(one))
    assert_equal(again, found)
    assert seen == [(20, 20)] and found.unusable.tolist() == [1]


def test_the_key_follows_everything_that_matters(cached, make_config, tmp_path):
    config, dataset, _, file = cached
    key = scan_key(dataset, config)
    assert file.name == f"{key}.npz"
    keys = {key}
    for update in ({"max_length": 41}, {"max_image_pixels": 5}, {"on_error": "raise"}):
        keys.add(scan_key(dataset, config.model_copy(update=update)))
    text_only = {"modalities": {}, "ignore_columns": ["images", "audio"]}
    keys.add(scan_key(open_split(config.model_copy(update=text_only), "train"), config))
    other = config.model_copy(update={"tokenizer": str(tmp_path / "other")})
    build_tokenizer("{{ messages }}").save_pretrained(tmp_path / "other")
    keys.add(scan_key(dataset, other))
    keys.add(scan_key(dataset, config, "ProcessedSizes"))
    os.utime(tmp_path / "train.jsonl", ns=(1, 1))
    keys.add(scan_key(dataset, config))
    with open(tmp_path / "train.jsonl", "a") as rows:
        rows.write("\n")
    os.utime(tmp_path / "train.jsonl", ns=(1, 1))
    keys.add(scan_key(dataset, config))
    assert len(keys) == 9
    # The folder of the run, and its batches, do not matter.
    same = config.model_copy(update={"batch_size": 12, "seed": 3})
    assert scan_key(dataset, same) in keys


def test_damage_is_noticed_and_repaired(cached, tmp_path):
    config, dataset, found, file = cached
    good = file.read_bytes()
    key = file.stem
    damaged = [b"", b"PK", good[: len(good) // 2], b"\x80\x04N." * 100]
    flipped = bytearray(good)
    for at in range(0, len(good), 97):
        flipped[at] ^= 0x55
    for content in (*damaged, bytes(flipped)):
        file.write_bytes(content)
        assert load_scan(file.parent, key, dataset, config) is None
        assert_equal(scan(dataset, config, cache=file.parent), found)
        assert load_scan(file.parent, key, dataset, config) is not None
    assert [one.name for one in file.parent.iterdir()] == [file.name]


def test_one_flipped_byte_never_changes_a_scan(cached):
    config, dataset, found, file = cached
    good = file.read_bytes()
    for at in np.random.default_rng(0).choice(len(good), 200, replace=False):
        changed = bytearray(good)
        changed[at] ^= 0xFF
        file.write_bytes(changed)
        again = load_scan(file.parent, file.stem, dataset, config)
        if again is not None:  # a byte that is never read
            assert_equal(again, found)


def test_another_data_sets_scan_is_not_used(cached, make_config, tmp_path):
    config, dataset, found, file = cached
    with zipfile.ZipFile(file) as stored:
        assert "text_tokens.npy" in stored.namelist()
    fewer = type(found)(
        found.text_tokens[:-1], found.counts, found.items, found.sources, found.source_names,
        found.unusable, found.reasons,
    )
    save_scan(file.parent, file.stem, fewer)
    assert load_scan(file.parent, file.stem, dataset, config) is None
    save_scan(file.parent, "another", found)
    (file.parent / "another.npz").replace(file)
    assert load_scan(file.parent, file.stem, dataset, config) is None


def test_nothing_is_unpickled(cached):
    config, dataset, _, file = cached

    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(file.parent / "trapped"),)

    np.savez(file, key=np.array([Trap()], dtype=object))
    assert load_scan(file.parent, file.stem, dataset, config) is None
    assert not (file.parent / "trapped").exists()


def test_the_default_folder_is_below_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("RAYMM_CACHE", str(tmp_path))
    assert default_cache() == tmp_path / "scans"


def test_code_of_a_processors_folder_counts(tmp_path) -> None:
    folder = tmp_path / "processor"
    keys = set()
    for text in ("SIZE = 1", "SIZE = 2"):
        folder.mkdir(exist_ok=True)
        (folder / "processing_own.py").write_text(text)
        keys.add(_fingerprint(str(folder), "data.processor"))
    assert len(keys) == 2


def scanned():
    return SampleScan(
        text_tokens=np.array([5, 0, 7]),
        counts={"vision": np.array([2, 0, 1]), "audio": np.array([0, 0, 2])},
        items={
            "vision": np.array([[4, 2, 1], [3, 3, 1], [10, 1, 2]]),
            "audio": np.array([[32_000, 16_000, 1], [0, 0, 0]]),
        },
        sources=np.array([0, 1, 1]), source_names=("a", "b"),
        unusable=np.array([1]), reasons=("broken",),
    )


def test_items_count_as_one_unit_by_default():
    sizes = scanned().sizes()
    assert sizes.values.tolist() == [[2, 0, 5], [0, 0, 0], [1, 2, 7]]


def test_units_are_summed_over_the_items_of_a_sample():
    sizes = scanned().sizes({"vision": lambda items: items.prod(axis=1)})
    assert sizes.values[:, 0].tolist() == [4 * 2 + 3 * 3, 0, 20]
    assert sizes.values[:, 1].tolist() == [0, 0, 2]


def test_the_length_of_an_unreadable_sound_is_zero():
    assert scanned().seconds("audio").tolist() == [2.0, 0.0]


def test_a_dataset_without_samples_has_no_sizes():
    none = np.zeros(0, np.int64)
    scan = SampleScan(
        none, {"vision": none}, {"vision": none.reshape(0, 3)}, none, ("a",), none, ()
    )
    assert len(scan) == 0 and scan.sizes().values.shape == (0, 2)
