"""Imports by name: objects of users, and optional packages with instructions to install them."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.requirements import Requirement

from raymm.errors import USER_CODE_RAISES, ConfigError, Error, ModelError

# Packages that processors of published models need, and the extra that installs them.
VLM, VLM_EXTRA = ("torchvision", "num2words"), "vlm"

# Sentences of transformers about a package that is not installed.
_MISSING = re.compile(r"requires the (?:\W+ )?([\w.-]+) library|[Pp]ackage `([\w.-]+)`")
# Packages whose frames are in the traceback when another one is broken.
_CALLERS = {"raymm", "torch", "transformers"} | sys.stdlib_module_names
_INSTALLED = ("site-packages", "dist-packages")
_IMPORT_PATH = re.compile(r"[^\W\d][\w.]*:[^\W\d]\w*")


def is_import_path(value: object) -> bool:
    """Return True for a text of the form ``"package.module:name"``."""
    return isinstance(value, str) and _IMPORT_PATH.fullmatch(value) is not None


def import_object(target: str) -> Any:
    """Return the object that ``"package.module:name"`` names. Raise a ``ModelError`` if the path is
    malformed, or there is no such module or name."""
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise ModelError(f"import path is {target!r}; expected 'package.module:name'")
    try:
        return getattr(importlib.import_module(module_name), name)
    except USER_CODE_RAISES as error:  # importing a module may raise anything
        reason = str(error)
        if not isinstance(error, ImportError | AttributeError):
            reason = f"{type(error).__name__}: {error}"
        raise ModelError(f"import path {target!r} cannot be resolved: {reason}") from error


def user_function(field: str, value: Any, accepted: str) -> Callable[..., Any]:
    """Return the function of a configuration field.

    Args:
        value: the function, or its import path ``"package.module:name"``.
        accepted: end of the error message.

    Raises:
        ConfigError: the value cannot be imported or called; names the field, the value and what is
            accepted.
    """
    try:
        function = import_object(value) if isinstance(value, str) else value
    except ModelError as error:
        raise ConfigError(f"{field} is {value!r}: {error}; accepted: {accepted}") from None
    if not callable(function):
        raise ConfigError(
            f"{field} is {value!r}, a {type(function).__name__}; accepted: {accepted}"
        )
    return function


def require(package: str, extra: str | None, purpose: str) -> ModuleType:
    """Import an optional package in a version that the extra accepts.

    Args:
        extra: extra of raymm that installs the package; None if no extra does.
        purpose: subject of the error message: the setting, file or class that needs the package.

    Raises:
        ConfigError: the package is not installed, too old, or its import fails.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise _broken(package, purpose, error) from error
        target = package if extra is None else f"'raymm[{extra}]'"
        raise ConfigError(
            f"{purpose} needs the package {package}, which is not installed: pip install {target}"
        ) from None
    except Exception as error:  # a package built for another version may raise anything
        raise _broken(package, purpose, error) from error
    if (needed := _unmet_requirement(package, extra)) is not None:
        raise ConfigError(
            f"{purpose} needs {needed}, version {metadata.version(package)} is installed: "
            f"pip install 'raymm[{extra}]'"
        )
    return module


@contextmanager
def explained_imports(purpose: str) -> Iterator[None]:
    """Turn a library's error about a missing or broken package into a :class:`ConfigError`. Other
    errors pass unchanged. ``purpose`` is the subject of the message, as in :func:`require`."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        for package in _suspects(error):
            require(package, VLM_EXTRA if package in VLM else None, purpose)
        raise


def is_installed(package: str) -> bool:
    """Return True if a package can be found, without importing it."""
    return importlib.util.find_spec(package) is not None


@cache
def _unmet_requirement(package: str, extra: str | None) -> str | None:
    """Return the extra's requirement of a package if the installed version does not meet it."""
    try:
        version = metadata.version(package)
        requirements = [Requirement(text) for text in metadata.requires("raymm") or ()]
    except metadata.PackageNotFoundError:  # raymm runs from a folder, or the names differ
        return None
    for needed in requirements:
        applies = needed.marker is not None and needed.marker.evaluate({"extra": extra or ""})
        if needed.name == package and applies and not needed.specifier.contains(version, True):
            return f"{package}{needed.specifier}"
    return None


def _broken(package: str, purpose: str, error: Exception) -> ConfigError:
    cause = " ".join(str(error).split())
    return ConfigError(
        f"{purpose} needs the package {package}, which cannot be imported "
        f"({type(error).__name__}: {cause}); installing it together with what it depends on "
        f"replaces a build for other versions: pip install --force-reinstall {package}"
    )


def _suspects(error: BaseException) -> list[str]:
    """Return the packages that an error names, or whose import raised its first cause."""
    cause, link = error, error
    while link is not None:
        cause, link = link, link.__cause__ or (
            None if link.__suppress_context__ else link.__context__
        )
    names = []
    if isinstance(error, ImportError):
        names = [(match[1] or match[2]).lower() for match in _MISSING.finditer(str(error))]
        if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
            names.append(cause.name.partition(".")[0])
    for frame, _ in reversed([*traceback.walk_tb(cause.__traceback__)]):
        name = frame.f_globals.get("__name__", "").partition(".")[0]
        in_package = any(folder in frame.f_code.co_filename for folder in _INSTALLED)
        if in_package and name not in _CALLERS:
            names.append(name)
    # A package whose import failed is not among the imported modules.
    return [name for name in dict.fromkeys(names) if name not in sys.modules]
