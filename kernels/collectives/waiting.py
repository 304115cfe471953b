"""Waiting for other processes, in one place, so that whoever looks at a process's stack, or at
where an error comes from, knows that it was that."""

from __future__ import annotations

from datetime import timedelta
from types import CodeType
from typing import Protocol

import torch.distributed as dist

from raymm.errors import InternalError


class Waitable(Protocol):
    """What an operation between processes returns that has been started."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...


def started(work: dist.Work | None) -> dist.Work:
    """A send or receive of a process that is in the group (None is what others get)."""
    assert work is not None
    return work


class CommunicationError(InternalError, RuntimeError):
    """An operation between processes failed: another one is gone, or did not come in time."""


def wait(work: Waitable, timeout: timedelta | None = None) -> None:
    """Until an operation is done.

    Args:
        work: the operation.
        timeout: by default that of its process group.

    Raises:
        CommunicationError: it failed.
    """
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise CommunicationError(str(error)) from error


_DISTRIBUTED = dist.__path__[0]
# Tensors of several processes compute in there, too.
_TENSORS = f"{_DISTRIBUTED}/tensor/"


def is_communication(code: CodeType) -> bool:
    """Whether a function exists to talk to other processes: :func:`wait`, and those of
    ``torch.distributed``."""
    file = code.co_filename
    return code is wait.__code__ or (
        file.startswith(f"{_DISTRIBUTED}/") and not file.startswith(_TENSORS)
    )
