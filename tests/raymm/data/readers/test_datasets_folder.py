"""Folders of datasets, and data sets by name from the cache of datasets, without the hub."""

import json
import pickle
import shutil

import pytest
from pydantic import ValidationError

from raymm.data import DataConfig, open_source, open_split
from raymm.data.readers import DatasetsFolder
from raymm.errors import DataError
from tests.support.same_rows import write_datasets_folder

NAME = "hf://datasets/some-org/some_pictures"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Return a data set that was downloaded before, in the cache of ``datasets``."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    saved = write_datasets_folder(tmp_path, 20)
    folder = tmp_path / "cache" / "some-org___some_pictures" / "default" / "0.0.0" / ("a" * 40)
    folder.mkdir(parents=True)
    (file,) = saved.glob("*.arrow")
    shutil.copy(file, folder / "some_pictures-train.arrow")
    info = json.loads((saved / "dataset_info.json").read_text())
    split = {"name": "train", "num_bytes": 1, "num_examples": 20, "dataset_name": "some_pictures"}
    info |= {
        "dataset_name": "some_pictures", "config_name": "default", "splits": {"train": split},
        "builder_name": "parquet", "version": {"version_str": "0.0.0", "major": 0, "minor": 0,
                                               "patch": 0},
    }
    (folder / "dataset_info.json").write_text(json.dumps(info))
    return folder


def test_a_data_set_by_name_equals_its_folder(make_config, tmp_path, cached):
    dataset = open_split(make_config(train=NAME), "train")
    folder = open_split(make_config(train=str(tmp_path / "saved")), "train")
    assert dataset.name == "some_pictures" and dataset.path == cached and len(dataset) == 20
    again = pickle.loads(pickle.dumps(dataset))
    for name in ("vision", "audio"):
        assert dataset.counts[name].tolist() == folder.counts[name].tolist()
    for i in range(20):
        assert again[i].id == folder[i].id and again[i].messages == folder[i].messages
        assert list(again[i].media) == list(folder[i].media)
    (cached / "some_pictures-train.arrow").unlink()
    with pytest.raises(DataError, match="cannot load split"):
        pickle.loads(pickle.dumps(dataset))[0]


def test_missing_hub_data_sets_are_named(make_config, cached):
    for source, reason in (
        ("hf://datasets/some-org/other", "other.*cannot load split 'train', subset None"),
        ({"path": NAME, "split": "test"}, "split 'test'.*accepted: a data set of the hub"),
        ({"path": NAME, "subset": "large"}, "subset 'large'"),
    ):
        with pytest.raises(DataError, match=f"(?s){reason}"):
            open_split(make_config(train=source), "train")


@pytest.mark.parametrize(("source", "reason"), [
    ("hf://models/a/b", "expected hf://datasets/ORG/NAME"),
    ("hf://datasets/a/b/c.parquet", "expected hf://datasets/ORG/NAME"),
    ({"path": NAME, "split": "train[:10%]"}, "split is 'train.:10%.'; accepted: the name of a"),
    ({"path": NAME, "format": "json"}, "format is 'json'; accepted with hf://.*: none"),
    ({"path": "a.jsonl", "split": "test"}, "are accepted for hf://"),
])
def test_names_that_are_refused(source, reason):
    with pytest.raises(ValidationError, match=reason):
        DataConfig(train=source, tokenizer="t", batch_size=1, microbatches=1)


def test_datasets_folders_with_splits_are_checked(tmp_path):
    import datasets

    folder = tmp_path / "d"
    one = datasets.Dataset.from_dict({"text": ["a", "b"]})
    datasets.DatasetDict(train=one, test=one).save_to_disk(folder)
    with pytest.raises(DataError, match=r"splits \['test', 'train'\]; name one"):
        open_source(folder)
    assert [sample.text for sample in open_source(folder / "train")] == ["a", "b"]
    with pytest.raises(DataError, match="save_to_disk"):
        DatasetsFolder(tmp_path)
    caption = datasets.Dataset.from_dict({"caption": ["a"]})
    caption.save_to_disk(tmp_path / "c")
    with pytest.raises(DataError, match=r"'messages' \(or .*'text'\).*'caption'"):
        open_source(tmp_path / "c")
    shuffled = one.select([1, 0, 1])
    shuffled.save_to_disk(tmp_path / "e")
    assert [sample.text for sample in open_source(tmp_path / "e")] == ["b", "a", "b"]
