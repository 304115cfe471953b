"""Key of all user code that a function or class can reach, for caches of its results.

The key covers the syntax trees of the modules that define the code and of all user modules that
those import, wherever the statement is; the values of their variables; what functions close over;
and the versions of libraries. Files that the code reads are not covered.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

from raymm.errors import USER_CODE_RAISES, ModelError
from raymm.storage.code_digest import ValueDigest

# Calls that run code which no import statement names.
_RUNS_UNNAMED = {"exec", "eval", "__import__"}
_LOADS_UNNAMED = {
    "import_module", "spec_from_file_location", "exec_module", "run_path", "run_module",
}
_INSTALLED = {"site-packages", "dist-packages"}
_OWN = "raymm"


def reached_code(roots: Iterable[Any], code_version: str | None, strict: bool) -> dict[str, Any]:
    """Return a description of user code, plain JSON, that differs when the code differs. Raise a
    ``ModelError`` if the code imports modules by name, has no source file, or holds values that
    cannot be hashed.

    Args:
        code_version: text that the user changes with the code; with it, nothing is refused.
        strict: refuse code whose changes would not be noticed.
    """
    values = ValueDigest(strict=True)
    for root in roots:
        values.feed(root)
    sources: dict[str, str] = {}
    libraries: dict[str, str] = {}
    pending = sorted(values.modules)
    while pending:
        name = pending.pop()
        if name in sources:
            continue
        top = name.partition(".")[0]
        if top in sys.stdlib_module_names and name != "__main__":
            continue
        spec = _find(name)
        file = _file(name, spec)
        if top == _OWN or file is not None and _INSTALLED & set(file.parts):
            libraries[top] = _version(top)
            continue
        if spec is not None and file is None and spec.submodule_search_locations:
            continue  # a namespace package: a folder without code
        if file is None and name not in sys.modules:
            sources[name] = "absent"  # an optional import, or not a module
            continue
        sources[name], imported, unseen = _read(name, spec, file)
        values.unseen += unseen
        pending += imported
        _feed_variables(values, name)
    if strict and values.unseen and code_version is None:
        code = ", ".join(name for name, source in sources.items() if source != "absent")
        raise ModelError(
            f"cache.version is not set, and changes to user code ({code}) might go unnoticed: it "
            f"{values.unseen[0]}. Set cache.version to a text that you change whenever the code or "
            "a file that it reads changes, or set cache.features to 'host' or 'none'"
        )
    return {
        "sources": sources, "libraries": libraries, "version": code_version,
        "values": values.hashed.hexdigest(), "python": list(sys.version_info[:2]),
    }


def _find(name: str) -> ModuleSpec | None:
    """Return the spec of a module without importing its parents."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        prefix = ".".join(parts[:count])
        spec = getattr(sys.modules.get(prefix), "__spec__", None)
        if spec is None:
            try:
                spec = (
                    importlib.util.find_spec(prefix) if path is None
                    else PathFinder.find_spec(prefix, path)
                )
            except (ImportError, ValueError):  # ValueError: a module without a spec
                spec = None
        if spec is None:
            return None
        path = spec.submodule_search_locations or []
    return spec


def _file(name: str, spec: ModuleSpec | None) -> Path | None:
    origin = getattr(sys.modules.get(name), "__file__", None) or (spec and spec.origin)
    file = None if origin is None else Path(origin)
    return file if file is not None and file.is_file() else None


_distributions = cache(packages_distributions)  # reads the file lists of all distributions


@cache
def _version(library: str) -> str:
    """Return the versions of the distributions that have a top-level package."""
    names = sorted(set(_distributions().get(library, ())))
    return ", ".join(f"{name} {version(name)}" for name in names)


def _read(
    name: str, spec: ModuleSpec | None, file: Path | None
) -> tuple[str, list[str], list[str]]:
    """Return a digest of a module's syntax, its imports, and reasons why it may use more code."""
    if file is None:
        return "unknown", [], [f"is defined in module {name!r}, which has no source file"]
    content = file.read_bytes()
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # a compiled extension
        unseen = [f"is defined in {file}, which is not Python source"]
        return hashlib.sha256(content).hexdigest(), [], unseen
    is_package = spec is not None and spec.submodule_search_locations is not None
    package = name if is_package else name.rpartition(".")[0]
    imported, unseen = list(_parents(name)), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [name for alias in node.names for name in _parents(alias.name, True)]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [node.module])])
            imported += _parents(base, True)
            imported += [f"{base}.{alias.name}" for alias in node.names if alias.name != "*"]
        elif (
            isinstance(node, ast.Name) and node.id in _RUNS_UNNAMED | _LOADS_UNNAMED
            or isinstance(node, ast.Attribute) and node.attr in _LOADS_UNNAMED
        ):
            called = node.id if isinstance(node, ast.Name) else node.attr
            unseen.append(f"runs code by name ({called}, {file.name} line {node.lineno})")
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest(), imported, unseen


def _parents(name: str, itself: bool = False) -> Iterator[str]:
    """Yield the packages that a module is in, and the module."""
    parts = name.split(".")
    for count in range(1, len(parts) + itself):
        yield ".".join(parts[:count])


def _feed_variables(values: ValueDigest, module: str) -> None:
    """Add variables of a module and attributes of its classes; the environment may affect them."""
    variables = vars(sys.modules[module]) if module in sys.modules else {}
    spaces = [(module, variables)] + [
        (kind.__qualname__, vars(kind)) for kind in list(variables.values())
        if isinstance(kind, type) and kind.__module__ == module
    ]
    for space, names in spaces:
        for name, value in sorted(names.items()):
            if name.startswith("__") or isinstance(value, _BY_SOURCE):
                continue
            values.hashed.update(f"{space}.{name}".encode())
            unseen_before = len(values.unseen)
            try:
                values.feed(value)
            except USER_CODE_RAISES as error:  # a value of any class may raise
                values.unseen.append(f"has a value that cannot be hashed ({error})")
            values.unseen[unseen_before:] = [
                f"reads {space}.{name}, which {why}" for why in values.unseen[unseen_before:]
            ]


# Types of attributes that are determined by the source.
_BY_SOURCE = (
    types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type, staticmethod,
    classmethod, property, types.MemberDescriptorType, types.GetSetDescriptorType,
)
