"""Missing or broken optional packages: one message with the command that installs them.

It is printed before anything starts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from examples.vlm.kinds import KINDS
from raymm import packages
from raymm.errors import ConfigError
from raymm.packages import explained_imports, require
from tests.support.tiny_folders import tiny

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = ROOT / "tests/install/hidden"
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
# Use (tests/install/uses.py) -> required package, and extra that installs it.
NEEDS = {
    "a Parquet file": ("pyarrow", "parquet"),
    "a compressed file": ("zstandard", "zstd"),
    "a folder of datasets": ("datasets", "datasets"),
    "a data set of the hub": ("datasets", "datasets"),
    "a data file in a bucket": ("pyarrow", "storage"),
    "a run in a bucket": ("pyarrow", "storage"),
    "video files": ("av", "video"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "mlflow": ("mlflow", "mlflow"),
    "qwen2_5_vl": ("torchvision", "vlm"),
    "qwen3_vl": ("torchvision", "vlm"),
    "llava_onevision": ("torchvision", "vlm"),
    "internvl": ("torchvision", "vlm"),
    "mistral3": ("torchvision", "vlm"),
    "smolvlm": ("torchvision", "vlm"),
}
SENTENCE = "needs the package {}, which is not installed: pip install 'raymm[{}]'"


def python(*arguments: str, hidden: str = "", path: str = "") -> subprocess.CompletedProcess[str]:
    folders = [path, str(HIDDEN), str(ROOT)]
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=250, cwd=ROOT,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "HIDDEN_PACKAGES": hidden, "HF_HUB_OFFLINE": "1",
        },
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in KINDS:
        (folder / kind).symlink_to(Path(tiny(kind)[0]).parent)
    return folder


@pytest.fixture(scope="module")
def raised(models) -> dict:
    """Return the error of every use without any of the packages."""
    hidden = ",".join(sorted({package for package, _ in NEEDS.values()} | {"num2words"}))
    done = python("tests/install/uses.py", str(models), hidden=hidden)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.system
@pytest.mark.parametrize("use", NEEDS)
def test_a_missing_package_is_one_sentence_with_its_extra(raised, use):
    package, extra = NEEDS[use]
    _, message = raised[use]
    (sentence,) = [line for line in message.splitlines() if "needs the package" in line]
    assert SENTENCE.format(package, extra) in sentence
    assert any(re.match(rf"{package}\b", each) for each in EXTRAS[extra]), EXTRAS[extra]


@pytest.mark.system
def test_processors_that_need_no_package_load_without(raised):
    assert {kind for kind in KINDS if raised[kind] is None} == set(KINDS) - set(NEEDS)


@pytest.mark.system
def test_a_processor_that_needs_num2words_names_it(models):
    code = (
        "from raymm.data.conversations.processor import ModelProcessor as P;"
        f"P({str(models / 'smolvlm/model')!r})"
    )
    done = python("-c", code, hidden="num2words")
    assert SENTENCE.format("num2words", "vlm") in done.stderr.splitlines()[-1]


@pytest.mark.system
@pytest.mark.parametrize("state, words", [
    ("missing", SENTENCE.format("torchvision", "vlm")),
    ("broken", "the package torchvision, which cannot be imported (RuntimeError: operator "
     "torchvision::nms does not exist); installing it together with what it depends on replaces a "
     "build for other versions: pip install --force-reinstall torchvision"),
])  # fmt: skip
def test_the_command_ends_before_ray_starts(state, words, tmp_path):
    folder, data = tiny("qwen2_5_vl")
    place = tmp_path / "site-packages"
    if state == "broken":  # like torchvision with a torch that it was not built for
        (place / "torchvision").mkdir(parents=True)
        (place / "torchvision/__init__.py").write_text(
            "raise RuntimeError('operator torchvision::nms does not exist')"
        )
    done = python(
        "-m", "raymm", "train", "--model", folder, "--data", data, "--out", str(tmp_path / "run"),
        hidden="torchvision" if state == "missing" else "", path=str(place),
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_an_installed_package_is_returned():
    assert require("json", "none", "a test") is json


def test_a_package_that_lacks_another_is_broken(tmp_path, monkeypatch):
    (tmp_path / "lacking.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"lacking, which cannot be .*'not_installed_anywhere'"):
        require("lacking", "vlm", "a test")


def test_a_version_that_the_extra_does_not_admit_is_named(monkeypatch):
    monkeypatch.setattr(packages.metadata, "version", lambda name: "16.1")
    monkeypatch.setattr(packages.metadata, "requires", lambda name: [
        "json>=15; extra == 'parquet'", "json>=17; extra == 'storage'",
    ])  # fmt: skip
    packages._unmet_requirement.cache_clear()
    try:
        assert require("json", "parquet", "a test") is json
        with pytest.raises(ConfigError, match=(
            r"s3:// needs json>=17, version 16.1 is installed: pip install 'raymm\[storage\]'$"
        )):  # fmt: skip
            require("json", "storage", "s3://")
    finally:
        packages._unmet_requirement.cache_clear()


def test_a_library_without_an_extra_is_installed_by_name():
    with (
        pytest.raises(ConfigError, match="the model needs .* not installed: pip install nolib$"),
        explained_imports("the model"),
    ):
        raise ImportError("\nSomeBackbone requires the nolib library but it was not found")


def test_import_errors_of_other_causes_pass():
    with pytest.raises(ImportError, match="cannot import name"), explained_imports("a test"):
        from raymm.packages import NoSuchName  # noqa: F401  # pyright: ignore


def test_the_extra_for_models_has_its_packages():
    for package in packages.VLM:
        assert any(each.startswith(package) for each in EXTRAS[packages.VLM_EXTRA])
