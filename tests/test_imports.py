"""Libraries that packages may import, by the source of every file, and public docstrings.

Imports among the packages are checked by ``tests/house.py``.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SHORT = 5
PACKAGES = ("raymm", "actors", "scheduler", "kernels")


def sources(package: str) -> list[Path]:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package}/ has no Python file"
    return files


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_name(path: Path) -> str:
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts if parts[0] == "raymm" else ["raymm", *parts])


def imported(path: Path) -> list[tuple[int, str]]:
    """Return (line, dotted name) of every import in a file, including those inside functions."""
    names = []
    here = module_name(path).split(".")
    here = here if path.name == "__init__.py" else here[:-1]
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = here[: len(here) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # The name may be a module: ``from raymm import actors`` imports raymm.actors.
            names += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return names


@pytest.mark.parametrize("package", PACKAGES)
def test_siblings_are_imported_through_raymm(package: str) -> None:
    """Require it, because a top-level ``kernels`` may be the PyPI package of that name."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources(package)
        for line, name in imported(path)
        if name.split(".")[0] in {"actors", "scheduler", "kernels"}
    ]
    assert not wrong, "\n".join(wrong)


def test_scheduler_names_neither_ray_nor_torch() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("scheduler")
        for line, name in imported(path)
        if name.split(".")[0] in {"ray", "torch", "transformers"}
    ]
    assert not wrong, "\n".join(wrong)


def test_kernels_name_no_ray() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sources("kernels")
        for line, name in imported(path)
        if name.split(".")[0] == "ray"
    ]
    assert not wrong, "\n".join(wrong)


def test_importing_the_scheduler_loads_neither_ray_nor_torch() -> None:
    """Check indirect imports, too, such as those of ``raymm/__init__.py``."""
    names = [module_name(path) for path in sources("scheduler")]
    code = (
        f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_kernels_has_no_init() -> None:
    """Require this, or the repository's root on sys.path would make it the package ``kernels``."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def undocumented(path: Path) -> list[str]:
    """Return the parts of a file without a docstring.

    These are the file itself, its public classes, and public functions of more than :data:`SHORT`
    lines. A shorter function may be clear from its name and signature.
    """
    where = path.relative_to(ROOT)
    missing = [] if ast.get_docstring(tree(path)) else [f"{where}:1 the file"]
    for node in tree(path).body:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if isinstance(node, ast.FunctionDef) and lines <= SHORT:
            continue
        if not node.name.startswith("_") and not ast.get_docstring(node):
            missing.append(f"{where}:{node.lineno} {node.name}")
    return missing


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_have_a_docstring(package: str) -> None:
    missing = [line for path in sources(package) for line in undocumented(path)]
    assert not missing, "without a docstring:\n" + "\n".join(missing)
