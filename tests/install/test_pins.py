"""Versions of constraints.txt fit pyproject.toml, each other, and PyPI's wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
# Requirement of torch's CUDA wheel on triton. A CPU wheel has none, so installing it would not
# reveal a contradiction.
TRITON_OF_TORCH = {"2.11.0": "==3.6.0", "2.13.0": "==3.7.1", "2.14.1": "~=3.8.0"}
# Release of torch for which a release of torchvision was built.
TORCH_OF_TORCHVISION = {"0.29.1": "2.14.1"}
# Extras of `make train`, `make test` and the image.
EXTRAS = ("example,vlm", "dev")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line.split("==") for line in lines if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pinned}


def requirements() -> Iterator[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for group in (project["dependencies"], *project["optional-dependencies"].values()):
        yield from map(Requirement, group)


def test_triton_is_the_one_that_torch_requires():
    assert pins()["triton"] in SpecifierSet(TRITON_OF_TORCH[pins()["torch"]])


def test_torchvision_is_built_for_the_pinned_torch():
    assert TORCH_OF_TORCHVISION[pins()["torchvision"]] == pins()["torch"]


def test_ranges_admit_the_pins():
    pinned = pins()
    refused = [
        f"{each}: {version}" for each in requirements()
        if (version := pinned.get(canonicalize_name(each.name))) and version not in each.specifier
    ]
    assert not refused


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip as on a machine without any configuration."""
    environment = {
        name: value for name, value in os.environ.items()
        if not name.startswith("PIP_") or name == "PIP_CERT"
    }
    return subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, timeout=900,
        env={**environment, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )


@pytest.fixture(scope="module")
def registry() -> None:
    found = pip("index", "versions", "triton", "--retries", "0", "--timeout", "15")
    if found.returncode and re.search("ConnectionError|connection|timed out", found.stderr):
        pytest.skip(f"the package registry cannot be reached: {found.stderr.splitlines()[-1]}")


@pytest.mark.system
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("extras", EXTRAS)
def test_wheels_of_the_registry_fit_together(registry, extras):
    """Use ``fast-deps``, which reads the metadata within wheels: megabytes instead of gigabytes."""
    resolved = pip(
        "install", "--dry-run", "--ignore-installed", "--quiet", "--use-feature", "fast-deps",
        "--constraint", str(ROOT / "constraints.txt"), f"{ROOT}[{extras}]",
    )
    assert resolved.returncode == 0, resolved.stdout + resolved.stderr


@pytest.mark.system
def test_a_contradiction_between_pins_is_found(registry, tmp_path):
    """Use torch 2.13.0 with triton 3.9.0."""
    constraints = tmp_path / "constraints.txt"
    constraints.write_text("torch==2.13.0\ntriton==3.9.0\n")
    resolved = pip(
        "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:", "--quiet",
        "--use-feature", "fast-deps", "--constraint", str(constraints), "torch", "triton",
    )
    assert resolved.returncode != 0 and "ResolutionImpossible" in resolved.stderr
