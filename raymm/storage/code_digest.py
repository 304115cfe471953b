"""Digests of user functions by their code and the values that they hold.

They detect changes that a name does not show (``<lambda>``, a partial, an edited body).
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import packages_distributions, version
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from raymm.errors import USER_CODE_RAISES, ModelError

# Maximum nesting of containers and of functions that hold functions.
MOST_DEPTH = 8
# Maximum number of values in a digest: a function may close over a whole dataset.
MOST_VALUES = 20_000
# Methods of types that are written in C.
_SLOTS = types.WrapperDescriptorType | types.MethodDescriptorType | types.MethodWrapperType


def code_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function, with Python's version, because bytecode depends on it. The
    digest covers bytecode, constants, defaults and closures; also the arguments of partials and the
    attributes of callable objects. Line numbers, comments, names of local variables, functions
    called by name, and objects other than plain values, tensors and arrays do not count."""
    digest = ValueDigest()
    digest.feed(function)
    version = ".".join(map(str, sys.version_info[:2]))
    return f"{digest.hashed.hexdigest()[:16]} (of Python {version})"


class ValueDigest:
    """SHA-256 of values and of the functions that they hold.

    Args:
        strict: also hash the pickled state of other objects, and the weights of modules.

    Attributes:
        modules: names of the Python modules that define the functions and classes fed so far.
        unseen: with ``strict``, sentences about values that could not be hashed.
    """

    def __init__(self, strict: bool = False) -> None:
        self.hashed = hashlib.sha256()
        self.modules: set[str] = set()
        self.unseen: list[str] = []
        self._strict = strict
        self._left = MOST_VALUES

    def feed(self, value: Any, depth: int = MOST_DEPTH) -> None:
        """Add a value of any type, and up to ``depth`` levels of nested values."""
        self.hashed.update(f"<{type(value).__module__}.{type(value).__qualname__}>".encode())
        self._left -= 1
        self._note_modules(value)
        if depth == 0 or self._left < 0:
            self.unseen.append(
                f"holds more than {MOST_VALUES:,} values" if depth
                else f"nests values more than {MOST_DEPTH} deep"
            )
            return
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.hashed.update(repr(value).encode(errors="backslashreplace"))
        elif isinstance(value, PurePath):
            self.hashed.update(os.fsencode(value))
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._feed_array(value)
        elif self._strict and isinstance(value, _SLOTS):
            self.hashed.update(value.__qualname__.encode())
        elif (elements := _parts(value)) is not None:
            if self._strict and isinstance(value, torch.nn.Module):
                elements = [*elements, dict(value.state_dict())]
            for element in elements:
                self.feed(element, depth - 1)
        elif self._strict:
            self._feed_pickled(value)
        self.hashed.update(b"</>")

    def _note_modules(self, value: Any) -> None:
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        self.modules.update(kind.__module__ for kind in kinds)
        name = getattr(value, "__module__", None)
        if isinstance(value, types.FunctionType | types.BuiltinFunctionType) and name:
            self.modules.add(name)

    def _feed_pickled(self, value: Any) -> None:
        try:
            self.hashed.update(pickle.dumps(value))
        except USER_CODE_RAISES as error:  # a class may raise anything
            self.unseen.append(
                f"holds a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
                f"pickled ({type(error).__name__})"
            )

    def _feed_array(self, array: torch.Tensor | np.ndarray) -> None:
        self.hashed.update(f"{array.dtype} {tuple(array.shape)}".encode())
        if isinstance(array, torch.Tensor):
            if array.is_meta:
                return
            array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self.hashed.update(array.tobytes())


def _parts(value: Any) -> list[Any] | None:
    """Return the values that a value consists of, in a fixed order; None if unknown."""
    if isinstance(value, types.ModuleType):
        return []
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_consts, value.co_names, value.co_argcount]
    if isinstance(value, types.FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, Mapping):
        return [element for key in sorted(value, key=repr) for element in (key, value[key])]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__qualname__, value.__self__]
    if isinstance(value, torch.nn.Module):  # its weights are in checkpoints
        return [str(value)]
    if dataclasses.is_dataclass(value):
        return [{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}]
    if callable(value):  # an object with __call__, or a callable of a compiled extension
        return [type(value).__call__, getattr(value, "__dict__", {})]
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None


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
