"""End of this process's connections: errors that NCCL's watchdog records, which no call raises on
the host, and shutting down connections while other threads wait on them.

gloo cannot abort an operation (``ProcessGroupGloo.abort`` does nothing), so a process that waits
for a lost one, even indirectly, would wait for the whole timeout. Each connection was accepted by
one of its ends, at a port on which that process listens. If every process shuts down the
connections that it has accepted, none is left, and all operations fail at once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# Watchdog mode that aborts communicators after an error. The default, 3, ends the process.
ABORT_ONLY = "2"
# Seconds between two checks for errors.
INTERVAL_S = 1.0
# Seconds between a timeout and the end of the process, for torch to write the flight recorder.
RECORD_S = 5.0


def only_abort() -> None:
    """Configure NCCL's watchdog to abort failed communicators without ending this process, unless a
    mode is set. Ranks can then reconnect. Call this before the first group is created."""
    if "NCCL_ASYNC_ERROR_HANDLING" not in os.environ:
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", ABORT_ONLY)


def nccl_error() -> str:
    """Return the first error of any NCCL group of this process: ``"TIMEOUT"``, ``"COMM_ERROR"`` or
    ``"REMOTE_ERROR"``. Empty without an error, and after the groups were aborted. The watchdog
    records an error before it aborts the communicator. Operations on the device then return with
    partly received buffers."""
    for group, (backend, _) in list(distributed_c10d._world.pg_map.items()):
        if backend == "nccl":
            error = group._get_backend(torch.device("cuda")).get_error()
            if error.name != "SUCCESS":
                return error.name
    return ""


def end_after_timeouts() -> None:
    """Start a thread that ends this process by SIGABRT after NCCL's watchdog has recorded a
    timeout, unless the driver has the groups aborted first."""
    threading.Thread(target=_end_after_timeout, name="nccl-timeouts", daemon=True).start()


def _end_after_timeout() -> None:
    while nccl_error() != "TIMEOUT":
        time.sleep(INTERVAL_S)
    time.sleep(RECORD_S)
    if nccl_error():
        print(
            "An NCCL operation did not finish within nccl_timeout_s, and the driver did not react; "
            "this process exits.", file=sys.stderr, flush=True,
        )
        os.abort()
    else:
        end_after_timeouts()


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
