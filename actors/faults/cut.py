"""Ends the connections of this process with others from outside of whoever waits for them.

gloo knows no way to give up an operation (``ProcessGroupGloo.abort`` does nothing), so whoever
waits for a process that waits for another one, which is gone, would wait for the whole timeout. Of
the two ends of each connection one has accepted it, at a port that its process listens at: where
every process shuts down what it has accepted, none is left, and all operations fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

_DESCRIPTORS = "/proc/self/fd"


class OwnConnections:
    """Those that are made from now on, until :meth:`cut`.

    Whatever else listens in this process (Ray) must do so already.
    """

    def __init__(self) -> None:
        self._of_others = _listening()

    def cut(self) -> int:
        """End them; in any thread, while others use them. Operations under way fail, those to come
        too. Returns how many there were, of those that this process has accepted."""
        _abort_nccl()
        ports = _listening() - self._of_others
        count = 0
        for connection in _tcp_sockets():
            with connection, contextlib.suppress(OSError):
                if not _listens(connection) and connection.getsockname()[1] in ports:
                    connection.shutdown(socket.SHUT_RDWR)
                    count += 1
        return count


# Aborted groups are never released: the destructor of one joins torch's watchdog, which sleeps for
# 60 seconds after an error, and the thread that wrote the flight recorder, which sleeps for 480.
_aborted: list[dist.ProcessGroup] = []


def _abort_nccl() -> None:
    """Abort all process groups if the default group is NCCL's, whose operations wait on the device
    without a limit. Torch forgets the groups: none is left to destroy."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        _aborted.extend(dist.distributed_c10d._world.pg_map)
        dist.distributed_c10d._abort_process_group()


def _listening() -> set[int]:
    ports = set()
    for connection in _tcp_sockets():
        with connection, contextlib.suppress(OSError):
            if _listens(connection):
                ports.add(connection.getsockname()[1])
    return ports


def _listens(connection: socket.socket) -> bool:
    return bool(connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _tcp_sockets() -> Iterator[socket.socket]:
    """Of this process; with descriptors of their own, so that none is another's by the time that it
    is looked at."""
    names = os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else []
    for name in names:
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        try:
            opened = socket.socket(fileno=descriptor)
        except OSError:  # no socket
            os.close(descriptor)
            continue
        if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
            yield opened
        else:
            opened.close()
