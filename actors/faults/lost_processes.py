"""Errors of operations between processes, told from those of the work itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb

import torch.distributed as dist

from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import is_communication


@contextmanager
def reporting_lost_processes(what: Callable[[], str]) -> Iterator[None]:
    """Turn what operations between processes raise, when another one is gone or does not come, into
    a :class:`ChannelError`: the driver then looks for that process. It goes by where the error was
    raised; what a module raised stays what it is, whatever its text."""
    try:
        yield
    except RuntimeError as error:
        if not _of_communication(error):
            raise
        raise ChannelError(f"{what()}: {error}") from error


def _of_communication(error: RuntimeError) -> bool:
    """Backends raise bare RuntimeErrors; their own classes come from where there is no Python."""
    if isinstance(error, dist.DistError):
        return True
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    return bool(frames) and is_communication(frames[-1].f_code)
