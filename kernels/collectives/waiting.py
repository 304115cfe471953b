"""Waiting for other processes, in one place, so that whoever looks at a process's stack, or at
where an error comes from, knows that it was that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist


class Waitable(Protocol):
    """What an operation between processes returns that has been started."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...


class PointToPoint(Protocol):
    """What sends to and receives from its other members: a process group, or its backend."""

    def rank(self) -> int:
        """This process's number in it."""
        ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Start sending one tensor; a :class:`torch.distributed.Work`.

        Args:
            tensors: the tensor.
            peer: the other's number.
            tag: of the message.
        """
        ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Start receiving one tensor.

        Args:
            tensors: what is written into.
            peer: the other's number.
            tag: of the message.
        """
        ...


def started(work: dist.Work | None) -> dist.Work:
    """A send or receive of a process that is in the group (None is what others get)."""
    assert work is not None
    return work


def wait(work: Waitable, timeout: timedelta | None = None) -> None:
    """Until an operation is done.

    Args:
        work: the operation.
        timeout: by default that of its process group.

    Raises:
        torch.distributed.DistError: it failed.
    """
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise dist.DistError(str(error)) from error


def send_to(group: PointToPoint, peer: int, tag: int, tensor: torch.Tensor) -> dist.Work:
    """Start sending, as :func:`torch.distributed.isend` does, whose checks of its arguments take
    longer than a small message.

    Args:
        group: of this process and the other.
        peer: the other's number *in the group*.
        tag: of the message; NCCL knows none.
        tensor: contiguous; must live until the operation is done.
    """
    return group.send([_real(tensor)], peer, tag)


def receive_from(group: PointToPoint, peer: int, tag: int, tensor: torch.Tensor) -> dist.Work:
    """Start receiving; the other end of :func:`send_to`.

    Args:
        group: of this process and the other.
        peer: the other's number *in the group*.
        tag: of the message.
        tensor: contiguous; what is received is written into it.
    """
    return group.recv([_real(tensor)], peer, tag)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_waits: set[CodeType] = set()
Function = TypeVar("Function", bound=Callable[..., Any])


def waits_for_others(function: Function) -> Function:
    """Says of a function that what it does itself is to wait for other processes: directly, or for
    a device that does."""
    _waits.add(function.__code__)
    return function


_DISTRIBUTED = dist.__path__[0]
# Tensors of several processes compute in there, too.
_TENSORS = f"{_DISTRIBUTED}/tensor/"


def is_communication(code: CodeType) -> bool:
    """Whether a function exists to talk to other processes: those here, and those of
    ``torch.distributed``."""
    file = code.co_filename
    return file == __file__ or (
        file.startswith(f"{_DISTRIBUTED}/") and not file.startswith(_TENSORS)
    )


# Of conditions and events, that others wait with.
_MEANS = (threading.__file__, torch.cuda.streams.__file__)


def is_waiting(frame: FrameType | None) -> bool:
    """Whether a stack ends in a wait for other processes.

    Args:
        frame: the innermost; None of a thread that has ended.
    """
    while frame is not None and frame.f_code.co_filename in _MEANS:
        frame = frame.f_back
    return frame is not None and (is_communication(frame.f_code) or frame.f_code in _waits)
