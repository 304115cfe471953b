"""Kinds of failures, determined by an error's type where it is raised, never by searching its text.

Code of other libraries may hide the type. Three such cases are recognised by fixed properties:
``threading`` raises a bare RuntimeError when no thread can be started, and torch's CPU allocator
and C++'s standard library raise RuntimeErrors with fixed texts.
"""

from __future__ import annotations

import errno
import functools
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any

import torch

from raymm.errors import Error, FailureKind, InternalError

_RESOURCE_NUMBERS = frozenset({
    errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EIO,
})
_CONNECTION_NUMBERS = frozenset({
    errno.ESTALE, errno.EPIPE, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.ENONET,
    errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.ESHUTDOWN,
    errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOBUFS, errno.EADDRNOTAVAIL,
    errno.EREMOTEIO, errno.ENOLINK, errno.ECOMM,
})
# Prefix of the bare RuntimeError that torch/c10 raises.
_CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:"
# Full texts of C++'s std::bad_alloc and std::system_error (of threads), as bindings pass them.
_NATIVE = frozenset({"std::bad_alloc", os.strerror(errno.EAGAIN), os.strerror(errno.ENOMEM)})
_PROGRAMMING = (
    ArithmeticError, AssertionError, AttributeError, InternalError, LookupError, NameError,
    NotImplementedError, TypeError,
)
_RAYMM = f"{Path(__file__).parents[2]}{os.sep}"
# Name of the attribute with which an error carries its kind to the driver.
_ATTRIBUTE = "raymm_failure_kind"
_LINE = "(failure kind: {})"


def failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of an error: the first one found among the error and its causes
    (``__cause__``). For an OSError without a number, the context counts as its cause. A kind that
    was determined before, possibly in another process, is kept."""
    carried = getattr(error, _ATTRIBUTE, None)
    if isinstance(carried, FailureKind):
        return carried
    for cause in _causes(error):
        if _is_resource(cause):
            return FailureKind.RESOURCE
        if _is_connection(cause):
            return FailureKind.CONNECTION
    return FailureKind.DEFECT if _is_defect(error) else FailureKind.USER


def carry_kind(error: BaseException) -> None:
    """Determine an error's kind where it is raised and attach it to the error. Pickling keeps
    attributes but drops tracebacks and causes. An error that pickles without attributes is
    classified on arrival."""
    with suppress(AttributeError, TypeError):
        setattr(error, _ATTRIBUTE, failure_kind(error))


def judging_errors(constructor: Callable[..., None]) -> Callable[..., None]:
    """Decorate an actor's constructor so that its errors carry their kind. Ray sends only the
    traceback of such an error, as text, so the kind is added as its last line."""

    @functools.wraps(constructor)
    def construct(*args: Any, **kwargs: Any) -> None:
        try:
            constructor(*args, **kwargs)
        except Exception as error:
            line = _LINE.format(failure_kind(error).value)
            if line not in getattr(error, "__notes__", ()):
                error.add_note(line)
            raise

    return construct


def constructor_kind(traceback: str) -> FailureKind:
    """Return the kind of an error that an actor's constructor raised, from the traceback's last
    line."""
    last = traceback.rstrip().rpartition("\n")[2].strip()
    kinds = {_LINE.format(kind.value): kind for kind in FailureKind}
    return kinds.get(last, FailureKind.USER)


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        bare = isinstance(cause, OSError) and cause.errno is None
        cause = cause.__cause__ or (cause.__context__ if bare else None)


def _is_resource(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if _is_of_ray(error, "ObjectStoreFullError", "OutOfDiskError", "OutOfMemoryError"):
        return True
    if isinstance(error, OSError):
        # gaierror uses different error numbers.
        return error.errno in _RESOURCE_NUMBERS and not isinstance(error, socket.gaierror)
    if type(error) is not RuntimeError:
        return False
    text = str(error)
    return (
        _innermost_code(error) is threading.Thread.start.__code__
        or text.startswith(_CPU_ALLOCATOR) or text in _NATIVE
    )


def _is_connection(error: BaseException) -> bool:
    if isinstance(error, OSError):
        classes = ConnectionError | TimeoutError | socket.gaierror
        return isinstance(error, classes) or error.errno in _CONNECTION_NUMBERS
    # Another process or an object is gone.
    return _is_of_ray(error, "RayActorError", "ObjectLostError", "NodeDiedError", "RpcError")


def _is_of_ray(error: BaseException, *names: str) -> bool:
    """Return True for an error of one of Ray's classes, without importing Ray."""
    exceptions = sys.modules.get("ray.exceptions")
    return any(isinstance(error, getattr(exceptions, name, ())) for name in names)


def _is_defect(error: BaseException) -> bool:
    """Return True for a programming error that raymm's own code raised. Errors that describe a
    user's mistake do not count."""
    if not isinstance(error, _PROGRAMMING):
        return False
    if isinstance(error, Error) and not isinstance(error, InternalError):
        return False
    code = _innermost_code(error)
    return code is not None and code.co_filename.startswith(_RAYMM)


def _innermost_code(error: BaseException) -> CodeType | None:
    code = None
    for frame, _ in walk_tb(error.__traceback__):
        code = frame.f_code
    return code
