"""Digests of user functions by their code and the values that they hold.

They detect changes that a name does not show (``<lambda>``, a partial, an edited body).
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pickle
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from raymm.errors import USER_CODE_RAISES

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
