"""Rendezvous for processes that are not actors: a TCP store on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from raymm.actors.rank.rendezvous import RendezvousStore

LOCAL = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)


def use_loopback() -> None:
    """Make gloo and NCCL connect over the loopback interface; variables that are set stay."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


class TcpRendezvousStore(RendezvousStore):
    """Rendezvous store of one process.

    Args:
        me: index of the process; the store of process 0 listens.
    """

    def __init__(self, me: int, processes: int, port: int) -> None:
        super().__init__(me, TIMEOUT)
        use_loopback()
        self._shared = dist.TCPStore(
            LOCAL, port, processes, me == 0, TIMEOUT, wait_for_workers=False
        )

    @contextmanager
    def opened(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any]
    ) -> Iterator[None]:
        """Open the store; all processes see all keys."""
        yield

    def set(self, key: str, value: bytes | str) -> None:
        self._shared.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is set."""
        return self._shared.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Block until all keys are set."""
        self._shared.wait(keys, timeout or TIMEOUT)
