"""Distinction between errors of communication and errors of the work itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch.distributed as dist

from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import is_communication


@contextmanager
def reporting_lost_processes(what: Callable[[], str]) -> Iterator[None]:
    """Convert errors of communication (a lost or late peer) to :class:`ChannelError`, after which
    the driver looks for the process at fault. The location where an error was raised decides, so
    errors of modules are unchanged, whatever their text."""
    try:
        yield
    except RuntimeError as error:
        if not _of_communication(error):
            raise
        raise ChannelError(f"{what()}: {error}") from error


def _of_communication(error: RuntimeError) -> bool:
    """Return True for torch's communication errors, and for bare RuntimeErrors that were raised in
    a communication function, as backends do."""
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and is_communication(frames[-1].f_code)
