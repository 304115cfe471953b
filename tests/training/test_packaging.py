"""Modules of an installed package and of a checkout that is not installed are the same."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.support import REPOSITORY

pytestmark = pytest.mark.system
PACKAGES = ("raymm", "actors", "scheduler", "kernels")
# One module per package and subpackage, and the console script's module.
IMPORTED = (
    "raymm.cli.main", "raymm.data", "raymm.draw", "raymm.actors.rank.rank_group",
    "raymm.actors.modules.cut", "raymm.scheduler.plan.plan", "raymm.kernels.cross_entropy",
    "raymm.kernels.flash.cpu.attention",
)


def python(code: str, cwd: Path, path: Path) -> str:
    """Return the output of a Python without site packages (no editable install, no ``.pth`` file).

    ``path`` comes first, the dependencies' folder after it.
    """
    libraries = f"import sys; sys.path.append({sysconfig.get_paths()['purelib']!r})\n"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-S", "-c", libraries + code], cwd=cwd, text=True, capture_output=True,
        env={**environment, "PYTHONPATH": str(path)}, timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def files_of(imported: str) -> dict[str, str]:
    return json.loads(imported.splitlines()[-1])


WHERE = f"""
import importlib, json
print(json.dumps({{name: importlib.import_module(name).__file__ for name in {IMPORTED!r}}}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    """Copy the repository without ignored files, as building leaves folders behind."""
    folder = tmp_path_factory.mktemp("copy")
    for name in PACKAGES:
        shutil.copytree(
            REPOSITORY / name, folder / name, symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    (folder / "README.md").write_text("raymm\n")
    return folder


def test_an_installed_package_holds_every_module(copy, tmp_path):
    target = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(target), str(copy)],
        check=True, timeout=240,
    )
    for name in PACKAGES:
        inside = target / "raymm" / ("" if name == "raymm" else name)
        in_source = {str(p.relative_to(copy / name)) for p in (copy / name).rglob("*.py")}
        installed = {str(p.relative_to(inside)) for p in inside.rglob("*.py")}
        assert in_source <= installed, f"not installed: {sorted(in_source - installed)}"
    assert not any((target / name).exists() for name in PACKAGES[1:])
    files = files_of(python(WHERE, tmp_path, target))
    assert all(Path(file).is_relative_to(target / "raymm") for file in files.values()), files


def test_an_uninstalled_checkout_has_the_same_modules(copy, tmp_path):
    files = files_of(python(WHERE, tmp_path, copy))
    for name, file in files.items():
        path = copy.joinpath(*name.split("."))
        assert Path(file) in (path.with_suffix(".py"), path / "__init__.py")


def test_import_raymm_is_quick(tmp_path):
    """Check that Ray and torch are imported lazily."""
    code = "import raymm; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    assert python(code, tmp_path, REPOSITORY).strip() == "[]"


def test_every_public_name_exists(tmp_path):
    code = "import raymm; print(sorted(n for n in raymm.__all__ if getattr(raymm, n, 0) is 0))"
    assert python(code, tmp_path, REPOSITORY).strip() == "[]"
