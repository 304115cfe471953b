"""Paths and dotted names in pages, docstrings and comments exist.

Files are parsed, never imported. Checked are paths that begin in a folder of this repository,
``python -m module``, dotted names of ``raymm``, names of Python files, links and imports on pages,
roles such as ``:class:`` in docstrings, and on pages links of functions to the files that define
them.
"""

import ast
import builtins
import functools
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests import house

ROOT = house.ROOT
PROGRAMS = (*house.PACKAGES, "tests", "benchmarks", "examples")
PAGES = ("README.md", "Makefile", ".ci/run", "pyproject.toml", "mkdocs.yml")
_PATH = re.compile(rf"(?<![\w/.:-])((?:{'|'.join((*PROGRAMS, 'docs'))})/[\w./*-]*[\w/*])")
_MODULE = re.compile(rf"(?<![\w/.-])-m ((?:{'|'.join(PROGRAMS)})(?:\.\w+)*)")
_DOTTED = re.compile(r"(?<![\w/.@:-])(raymm(?:\.[A-Za-z_]\w*)+)(?![\w/-])")
_FILE = re.compile(r"(?<![\w/.*<-])([\w/*]+\.py)\b")
_IMPORT = re.compile(r"from (raymm[\w.]*) import (\w+(?:, \w+)*)")
_LINK = re.compile(r"\]\(([\w./-]+)(?:#([\w-]+))?\)")
_DEFINED = re.compile(r"\[`([\w.]+)`\]\(([\w./-]+\.py)\)")
_ROLE = re.compile(r":(?:mod|class|func|meth|attr|data|exc):`~?([\w.]+)`")
# Files of other projects and users, and names with a blank in them.
_OTHERS = {
    "models/*/modeling_*.py", "model.py", "module.py", "-m benchmarks.NAME", "-m examples.NAME",
    "ray/dashboard/modules/job/job_supervisor.py", "raymm.yaml",
}  # fmt: skip


@functools.cache
def repository_files() -> frozenset[str]:
    """Return files of the repository, including new ones; ``raymm/x`` also for its siblings."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()
    present = [file for file in listed if (ROOT / file).exists()]
    linked = [f"raymm/{f}" for f in present if f.split("/")[0] in house.PACKAGES[:3]]
    return frozenset((*present, *linked))


@functools.cache
def folders() -> frozenset[str]:
    """Return folders that contain a file of the repository, at any depth."""
    return frozenset(
        str(folder) for file in repository_files() for folder in Path(file).parents
    )


def path_exists(path: str) -> bool:
    """Return True if a path, or a pattern with ``*``, exists; modules need no ``.py``."""
    if "*" in path:
        return any(Path(file).match(path) for file in repository_files())
    return bool({path, f"{path}.py"} & repository_files()) or path.rstrip("/") in folders()


@functools.cache
def names_of(file: str) -> frozenset[str]:
    """Return the names that a module defines or imports at its top level, including types."""
    found = set()
    body = house.tree(file).body
    for node in [inner for n in body for inner in (n.body if isinstance(n, ast.If) else [n])]:
        if isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
            if file == "raymm/__init__.py" and isinstance(node.value, ast.Dict):  # lazy names
                found |= {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    return frozenset(found)


@functools.cache
def classes() -> dict[str, list[ast.ClassDef]]:
    """Return classes of the packages by name."""
    found: dict[str, list[ast.ClassDef]] = defaultdict(list)
    for file in house.files():
        for node in house.tree(file).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return dict(found)


@functools.cache
def has_member(name: str, member: str, unknown: bool = True) -> bool:
    """Return True if a class or a base class has a member; ``unknown`` for foreign classes."""
    if name not in classes():
        return unknown
    for definition in classes()[name]:
        for node in ast.walk(definition):
            if member in (
                getattr(node, "name", ""),  # a method
                getattr(node, "id", "") if isinstance(getattr(node, "ctx", 0), ast.Store) else "",
                getattr(node, "attr", "") if isinstance(getattr(node, "ctx", 0), ast.Store) else "",
            ):
                return True
        if any(has_member(ast.unparse(base), member, unknown) for base in definition.bases):
            return True
    return False


def dotted_exists(name: str) -> bool:
    """Return True if a dotted name is that of a module, of its content, or of a class member."""
    parts = name.split(".")
    path = "/".join(parts)
    if path in folders() or f"{path}.py" in repository_files():
        return True
    for end in range(len(parts) - 1, 0, -1):
        stem, rest = "/".join(parts[:end]), parts[end:]
        file = f"{stem}.py" if f"{stem}.py" in repository_files() else f"{stem}/__init__.py"
        if file in repository_files():
            file = str((ROOT / file).resolve().relative_to(ROOT))
            return rest[0] in names_of(file) and (len(rest) == 1 or has_member(rest[0], rest[1]))
    return False


def defines(path: Path, name: str) -> bool:
    """Return True if a file defines a function, a class, or a method by ``Class.method``."""
    body: list[ast.stmt] = ast.parse(path.read_text()).body
    for part in name.split("."):
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        named = [node for node in body if isinstance(node, kinds) and node.name == part]
        if not named:
            return False
        body = named[0].body
    return True


def role_exists(name: str, file: str) -> bool:
    """Return True if a docstring's reference exists: in its file, by its full name, or in Python.
    """
    first, *rest = name.split(".")
    if first in ("raymm", ""):  # "": a file in the same folder
        folder = house.module_name(file).rpartition(".")[0]
        return dotted_exists(name if first else folder + name)
    if first in names_of(file) or first in dir(builtins):
        return not rest or has_member(first, rest[0])
    own = [node.name for node in house.tree(file).body if isinstance(node, ast.ClassDef)]
    return not rest and any(has_member(name, first, unknown=False) for name in own)


def headings(page: Path) -> set[str]:
    """Return the anchors of a page's headings."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in found}


# Pages that the build of the site creates (docs/hooks.py).
MADE = {ROOT / "docs" / name for name in ("configuration.md", "models.md")}


def dangling(text: str, file: str) -> list[str]:
    """Return the references of a file's text that do not exist."""
    found = [path for path in _PATH.findall(text) if not path_exists(path.rstrip("."))]
    found += [
        f"-m {name}" for name in _MODULE.findall(text) if not path_exists(name.replace(".", "/"))
    ]
    found += [name for name in _DOTTED.findall(text) if not dotted_exists(name)]
    if file.endswith(".md") or file in house.files():
        found += [
            name for name in _FILE.findall(text)
            if not _PATH.fullmatch(name)
            and not any(Path(other).match(name) for other in repository_files())
        ]
    if file.endswith(".md"):
        for module, names in _IMPORT.findall(text):
            whole = [f"{module}.{name}" for name in names.split(", ")]
            found += [name for name in whole if not dotted_exists(name)]
        for target, heading in _LINK.findall(text):
            path = (ROOT / file).parent / target
            if path in MADE:
                continue
            if not path.exists() or (heading and heading not in headings(path)):
                found.append(f"{target}#{heading}")
        for name, target in _DEFINED.findall(text):
            path = (ROOT / file).parent / target
            if path.is_file() and not defines(path, name):
                found.append(f"{name} of {target}")
    if file in house.files():
        found += [name for name in _ROLE.findall(text) if not role_exists(name, file)]
    return [name for name in found if name not in _OTHERS]


def test_references_exist() -> None:
    wrong = [
        f"{file}: {name}"
        for file in sorted(repository_files())
        if file in PAGES or file.startswith(tuple(f"{room}/" for room in (*PROGRAMS, "docs")))
        if file in PAGES or file.endswith((".py", ".md", ".yaml"))
        if file != "tests/test_references.py"
        if not file.startswith("benchmarks/log/")  # what was there when it was measured
        if Path(file).parts[:2] not in [("raymm", name) for name in house.PACKAGES[:3]]
        for name in dangling((ROOT / file).read_text(), file)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("right, wrong", [
    ("`kernels/flash/`", "`kernels/flush/`"),
    ("scheduler/schedule/lower.py", "scheduler/lower.py"),
    ("kernels/mask/*.py", "kernels/mask_*.py"),
    ("`lower.py`", "`lowering_of_plans.py`"),
    ("raymm.training.trainer.Trainer", "raymm.trainer.Trainer"),
    ("raymm.Trainer", "raymm.Trainers"),
    ("raymm.scheduler.plan.plan.Plan.from_json", "raymm.scheduler.plan.plan.Plan.of_json"),
    ("from raymm.kernels.hf import self_attention", "from raymm.kernels.hf import none"),
    ("[](docs/architecture.md)", "[](docs/architecture.md#no-such-heading)"),
    ("[`Plan.from_json`](scheduler/plan/plan.py)", "[`Plan.of_json`](scheduler/plan/plan.py)"),
    ("[`lower`](scheduler/schedule/lower.py)", "[`Plan`](scheduler/schedule/lower.py)"),
    ("python -m benchmarks.planner", "python -m benchmarks.planners"),
])  # fmt: skip
def test_missing_references_are_found(right: str, wrong: str) -> None:
    assert dangling(f"as in {right} (here)", "README.md") == []
    assert len(set(dangling(f"as in {wrong} (here)", "README.md"))) == 1


@pytest.mark.parametrize("right, wrong", [
    (":class:`Plan`", ":class:`Plans`"),
    (":meth:`Plan.from_json`", ":meth:`Plan.of_json`"),
    (":mod:`.stage`", ":mod:`.stages`"),
    (":exc:`ValueError`", ":exc:`ValuesError`"),
])  # fmt: skip
def test_references_of_docstrings(right: str, wrong: str) -> None:
    assert dangling(right, "scheduler/plan/plan.py") == []
    assert len(dangling(wrong, "scheduler/plan/plan.py")) == 1
