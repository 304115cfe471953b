"""Shuts down the connections of this process while other threads wait on them.

gloo cannot abort an operation (``ProcessGroupGloo.abort`` does nothing), so a process that waits
for a lost one, even indirectly, would wait for the whole timeout. Each connection was accepted by
one of its ends, at a port on which that process listens. If every process shuts down the
connections that it has accepted, none is left, and all operations fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import torch.distributed as dist

_DESCRIPTORS = "/proc/self/fd"


class OwnConnections:
    """Connections created after this object, until :meth:`cut`. Everything else that listens in
    this process (Ray) must already be listening."""

    def __init__(self) -> None:
        self._of_others = _listening()

    def cut(self) -> int:
        """Shut down the connections, from any thread; operations in flight and later ones fail.
        Return the number of accepted connections."""
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
    without a limit. Torch then forgets the groups, so they need not be destroyed."""
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
    """Yield TCP sockets of this process, with duplicated descriptors: a descriptor may be closed
    and reused meanwhile."""
    names = os.listdir(_DESCRIPTORS) if os.path.isdir(_DESCRIPTORS) else []
    for name in names:
        try:
            descriptor = os.dup(int(name))
        except OSError:
            continue
        try:
            opened = socket.socket(fileno=descriptor)
        except OSError:  # not a socket
            os.close(descriptor)
            continue
        if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
            yield opened
        else:
            opened.close()
