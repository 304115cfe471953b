"""Run of a VLM with cached features of its frozen tower: bitwise equal results.

The tower's largest part never runs on cached items.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raymm.cli.main import main
from tests.support.tiny_folders import modalities, tiny
from tests.support.tiny_run import curve

pytestmark = pytest.mark.usefixtures("ray_cluster")


def configuration(tmp_path: Path, name: str, features: str) -> str:
    folder, data = tiny("idefics3")
    values = {
        "run": {"storage_path": str(tmp_path / name), "steps": 5, "device": "cpu", "seed": 3},
        "model": {"path": folder, "train": {"vision": "frozen"}},
        "data": {
            "train": data, "heldout": data, "modalities": modalities("idefics3"), "batch_size": 6,
            "microbatches": 2,
        },
        "parallel": {"language_model": {"pp": 2}, "encoders": {"vision": {}}},
        "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
        "resources": {"cpus": 0.1},
        "cache": {"features": features, "folder": str(tmp_path / "features")},
    }
    file = tmp_path / f"{name}.yaml"
    file.write_text(yaml.safe_dump(values))
    return str(file)


def test_cached_features_do_not_change_a_run(tmp_path, capsys):
    def run(name: str, features: str) -> list:
        assert main(["train", configuration(tmp_path, name, features)]) == 0
        return curve(tmp_path / name)

    without = run("without", "none")
    assert run("first", "disk") == without
    assert f"features of vision are kept in {tmp_path / 'features'}" in capsys.readouterr().out
    assert [*(tmp_path / "features").glob("vision-*/??/*.features")]
