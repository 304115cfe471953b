"""Kinds of failures, judged where an error is raised: by its type, never by a search in its text.

Code of another library may hide the type. Three of these cases are told by what is fixed in them:
``threading`` raises a bare RuntimeError where no thread can be started, torch's CPU allocator and
C++'s standard library raise one with a fixed text.
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
# torch/c10 raises a bare RuntimeError that begins like this, whatever follows.
_CPU_ALLOCATOR = "[enforce fail at alloc_cpu.cpp:"
# Whole texts of C++'s std::bad_alloc and std::system_error (of threads), as bindings pass them on.
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
    """Return the kind of an error.

    An error is of the first kind found among itself and the errors that it was raised from
    (``__cause__``); a library's OSError that wraps another one without saying so has that as its
    context. A kind that was judged before, perhaps in another process, stays.
    """
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
    """Judge an error where it was raised, and have it carry its kind: pickling keeps attributes,
    and drops tracebacks and causes. An error whose class pickles without attributes is judged
    again, by its type, where it arrives."""
    with suppress(AttributeError, TypeError):
        setattr(error, _ATTRIBUTE, failure_kind(error))


def judging_errors(constructor: Callable[..., None]) -> Callable[..., None]:
    """Have errors that an actor's constructor raises carry their kind. Of such an error, Ray sends
    the traceback as text and nothing else, so the kind is a line of that text, after all that the
    error itself says."""

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
    """Return the kind of an error that an actor's constructor raised, as its last line says."""
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
        # gaierror has numbers of its own.
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
    # Another process is gone, or an object that was there.
    return _is_of_ray(error, "RayActorError", "ObjectLostError", "NodeDiedError", "RpcError")


def _is_of_ray(error: BaseException, *names: str) -> bool:
    """True for an error of one of Ray's classes, which are not loaded where Ray is not used."""
    exceptions = sys.modules.get("ray.exceptions")
    return any(isinstance(error, getattr(exceptions, name, ())) for name in names)


def _is_defect(error: BaseException) -> bool:
    """True for a programming error that raymm's own code raised; a sentence of raymm's, which names
    a setting, is none."""
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
