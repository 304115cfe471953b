"""Whether a function of the user's is still the same: by what it does and holds, where its name
says too little (``<lambda>``, a partial) or its body has been edited."""

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

# Containers in each other, and functions that functions hold.
MOST_DEPTH = 8
# Values looked at in all: what a function closes over may be a whole dataset.
MOST_VALUES = 20_000
# Methods of types that are written in C.
_SLOTS = types.WrapperDescriptorType | types.MethodDescriptorType | types.MethodWrapperType


def code_digest(function: Callable[..., Any]) -> str:
    """Of a function's bytecode and constants, its defaults and what it closes over; of a partial's
    arguments and a callable object's attributes, too. Line numbers, comments and names of local
    variables do not count, nor do other functions that it calls by name, nor objects of other
    kinds than plain values, tensors and arrays.

    Returns:
        The digest, with Python's version: others have other bytecode.
    """
    digest = ValueDigest()
    digest.feed(function)
    version = ".".join(map(str, sys.version_info[:2]))
    return f"{digest.hashed.hexdigest()[:16]} (of Python {version})"


class ValueDigest:
    """SHA-256 of values and of the functions that they hold.

    Args:
        strict: also hash the state of objects of other kinds, by pickling them, and the weights of
            modules.

    Attributes:
        hashed: the hash so far.
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
        """Add a value.

        Args:
            value: of any type.
            depth: levels of nested values to add.
        """
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
        elif (parts := _parts(value)) is not None:
            if self._strict and isinstance(value, torch.nn.Module):
                parts = [*parts, dict(value.state_dict())]
            for part in parts:
                self.feed(part, depth - 1)
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
        except USER_CODE_RAISES as error:  # a class may say anything
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
    """Return the values that a value consists of, in a fixed order; None if they are unknown."""
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
    return None


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
