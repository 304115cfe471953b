"""Whether a function of the user's is still the same: by what it does and holds, where its name
says too little (``<lambda>``, a partial) or its body has been edited."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

# Containers in each other, and functions that functions hold.
MOST_DEPTH = 8
# Values looked at in all: what a function closes over may be a whole dataset.
MOST_VALUES = 20_000
# Whose classes do what their version says.
_LIBRARIES = {"builtins", "raymm", "torch", "transformers"}


def code_digest(function: Callable[..., Any]) -> str:
    """Of a function's bytecode and constants, its defaults and what it closes over; of a partial's
    arguments and a callable object's attributes, too. Line numbers, comments and names of local
    variables do not count, nor do other functions that it calls by name, nor objects of other
    kinds than plain values, tensors and arrays.

    Returns:
        The digest, with Python's version: others have other bytecode.
    """
    digest = _Digest()
    digest.feed(function, MOST_DEPTH)
    version = ".".join(map(str, sys.version_info[:2]))
    return f"{digest.hashed.hexdigest()[:16]} (of Python {version})"


def class_digests(module: torch.nn.Module) -> dict[str, str]:
    """Of the functions of all classes that a module is made of, but for those of torch,
    transformers and raymm: :func:`code_digest` by name. What they call by name does not count.

    Args:
        module: whose weights do not count.
    """
    kinds = {kind for part in module.modules() for kind in type(part).__mro__}
    return {
        f"{kind.__module__}:{kind.__qualname__}.{name}": code_digest(function)
        for kind in kinds if kind.__module__.partition(".")[0] not in _LIBRARIES
        for name, value in vars(kind).items()
        if isinstance(function := _function(value), types.FunctionType)
    }


def _function(value: Any) -> Any:
    """What a name in a class stands for, without what makes it a property or a static method."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


class _Digest:
    def __init__(self) -> None:
        self.hashed = hashlib.sha256()
        self._left = MOST_VALUES

    def feed(self, value: Any, depth: int) -> None:
        self.hashed.update(f"<{type(value).__module__}.{type(value).__qualname__}>".encode())
        self._left -= 1
        if depth == 0 or self._left < 0:
            return
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self.hashed.update(repr(value).encode(errors="backslashreplace"))
        elif isinstance(value, PurePath):
            self.hashed.update(os.fsencode(value))
        elif isinstance(value, torch.Tensor | np.ndarray):
            self._feed_array(value)
        else:
            for part in _parts(value):
                self.feed(part, depth - 1)
        self.hashed.update(b"</>")

    def _feed_array(self, array: torch.Tensor | np.ndarray) -> None:
        self.hashed.update(f"{array.dtype} {tuple(array.shape)}".encode())
        if isinstance(array, torch.Tensor):
            if array.is_meta:
                return
            array = array.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        self.hashed.update(array.tobytes())


def _parts(value: Any) -> list[Any]:
    """What something is made of, in an order that is always the same."""
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
        return [part for key in sorted(value, key=repr) for part in (key, value[key])]
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, type):
        return [value.__module__, value.__qualname__]
    if isinstance(value, types.BuiltinFunctionType):
        return [value.__qualname__, value.__self__]
    if isinstance(value, torch.nn.Module):  # its weights are for checkpoints
        return [str(value)]
    if dataclasses.is_dataclass(value):
        return [{field.name: getattr(value, field.name) for field in dataclasses.fields(value)}]
    if callable(value):  # an object with __call__, or one of another language
        return [type(value).__call__, getattr(value, "__dict__", {})]
    return []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
