"""``raymm generate``: rejected input before a model is built, and the names of items."""

import pytest
import yaml

from raymm.cli.main import main
from tests.support.tiny_folders import modalities, tiny


@pytest.fixture
def whole_config(tmp_path):
    """Return a configuration of an untrained model with images."""
    folder, data = tiny("idefics3")
    file = tmp_path / "whole.yaml"
    file.write_text(yaml.safe_dump({
        "run": {"storage_path": str(tmp_path / "run"), "steps": 1},
        "model": {"path": folder},
        "data": {
            "train": data, "modalities": modalities("idefics3"), "batch_size": 1, "microbatches": 1,
        },
    }))
    return str(file)


def refusal(capsys, config, *arguments):
    capsys.readouterr()
    assert main(["generate", config, "--prompt", "what is this", *arguments]) == 2
    return " ".join(capsys.readouterr().err.split())


def test_a_run_without_a_checkpoint_is_refused(capsys, make_config, tmp_path):
    text = refusal(capsys, make_config({}))
    assert str(tmp_path / "run") in text and "has no checkpoint" in text and "raymm train" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["image", "images", "vision"])
def test_an_item_has_the_name_of_its_modality_or_tower(
    capsys, make_config, whole_config, inputs, name
):
    item = f"{name}={next(inputs.glob('*.png'))}"
    # a model of parts with an encoder 'vision', and a VLM
    for config in (make_config({}), whole_config):
        assert "has no checkpoint" in refusal(capsys, config, "--item", item)


@pytest.mark.parametrize(("item", "reason"), [
    ("audio=a.wav", "accepted: NAME=FILE, an existing file of one of these modalities: image"),
    ("image=nowhere.png", "--item is 'image=nowhere.png'"),
    ("a.png", "accepted: NAME=FILE"),
])
def test_an_item_of_no_modality_or_file_is_refused(capsys, whole_config, item, reason):
    assert reason in refusal(capsys, whole_config, "--item", item)
