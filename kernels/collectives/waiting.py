"""All waits for other processes, in one module, so that a stack trace shows whether a process waits
or an error comes from a wait."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist


class Waitable(Protocol):
    """A started operation between processes."""

    def wait(self, timeout: timedelta = ..., /) -> object: ...


class PointToPoint(Protocol):
    """Interface to send to and receive from members: a process group or its backend."""

    def rank(self) -> int:
        """Return this process's rank in the group."""
        ...

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Start sending a list of one tensor to rank ``peer``; return a
        :class:`torch.distributed.Work`."""
        ...

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int, /) -> Any:
        """Start receiving into a list of one tensor from rank ``peer``."""
        ...


def started(work: dist.Work | None) -> dist.Work:
    """Return the work of a send or receive. It is None only for processes outside the group."""
    assert work is not None
    return work


def wait(work: Waitable, timeout: timedelta | None = None) -> None:
    """Wait until an operation is done.

    Args:
        timeout: default: that of the process group.

    Raises:
        torch.distributed.DistError: the operation failed.
    """
    try:
        work.wait() if timeout is None else work.wait(timeout)
    except RuntimeError as error:
        raise dist.DistError(str(error)) from error


def send_to(group: PointToPoint, peer: int, tag: int, tensor: torch.Tensor) -> dist.Work:
    """Start sending a tensor, like :func:`torch.distributed.isend` without its argument checks,
    which take longer than a small message.

    Args:
        group: contains this process and the peer.
        peer: rank *in the group*.
        tag: ignored by NCCL.
        tensor: contiguous; must stay alive until the operation is done.
    """
    return group.send([_real(tensor)], peer, tag)


def receive_from(group: PointToPoint, peer: int, tag: int, tensor: torch.Tensor) -> dist.Work:
    """Start receiving into a contiguous tensor; the counterpart of :func:`send_to`."""
    return group.recv([_real(tensor)], peer, tag)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


_waits: set[CodeType] = set()
Function = TypeVar("Function", bound=Callable[..., Any])


def waits_for_others(function: Function) -> Function:
    """Mark a function that itself waits for other processes, directly or through a device."""
    _waits.add(function.__code__)
    return function


_DISTRIBUTED = dist.__path__[0]
# DTensor also computes there, so its functions do not count as communication.
_TENSORS = f"{_DISTRIBUTED}/tensor/"


def is_communication(code: CodeType) -> bool:
    """Return True for functions of this module and of ``torch.distributed`` that communicate."""
    file = code.co_filename
    return file == __file__ or (
        file.startswith(f"{_DISTRIBUTED}/") and not file.startswith(_TENSORS)
    )


# Modules of conditions and events, through which other functions wait.
_MEANS = (threading.__file__, torch.cuda.streams.__file__)


def is_waiting(frame: FrameType | None) -> bool:
    """Return True if a stack ends in a wait for other processes.

    Args:
        frame: the innermost frame; None for a thread that has ended.
    """
    while frame is not None and frame.f_code.co_filename in _MEANS:
        frame = frame.f_back
    return frame is not None and (is_communication(frame.f_code) or frame.f_code in _waits)
