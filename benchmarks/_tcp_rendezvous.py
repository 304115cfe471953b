"""Where processes meet that are no actors: a store that listens on this machine."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from raymm.actors.rank.rendezvous_store import RendezvousStore

LOCAL = "127.0.0.1"
TIMEOUT = timedelta(seconds=120)


def use_loopback() -> None:
    """Make gloo and NCCL connect over the loopback interface; variables that are set stay."""
    name = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


class TcpRendezvousStore(RendezvousStore):
    """One process's end.

    Args:
        me: the process's number; the first one's store listens.
        processes: how many will meet.
        port: where.
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
        """Everybody sees every key."""
        yield

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key."""
        self._shared.set(key, value)

    def get(self, key: str) -> bytes:
        """A key's value, once it is there."""
        return self._shared.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there."""
        self._shared.wait(keys, timeout or TIMEOUT)
