"""Where processes meet before they talk to one another."""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import torch.distributed as dist

# torch documents it, and does not re-export it as type checkers want.
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


def open_store(world_size: int, timeout: timedelta) -> tuple[str, TCPStore]:
    """The store in which processes find one another, and this node's address, at which alone it
    listens; from here on, as another process could take a port that was only found free.

    Args:
        world_size: how many will meet.
        timeout: that any of them may wait for another.
    """
    import ray

    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family, backlog=max(world_size, 128))
    port = listener.getsockname()[1]
    return address, TCPStore(
        address, port, world_size, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def new_group(
    ranks: Sequence[int], timeout: timedelta, backend: str | None = None
) -> dist.ProcessGroup:
    """A group of these processes; every process must call it. One that is not among them gets
    ``GroupMember.NON_GROUP_MEMBER``, with which it can do nothing."""
    made = dist.new_group(list(ranks), timeout=timeout, backend=backend)
    return cast(dist.ProcessGroup, made)


def stay_on(address: str) -> None:
    """Where processes meet on the loopback interface, those of gloo listen on no other. To be
    called before the first process group is made."""
    if ipaddress.ip_address(address).is_loopback:
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        for name in names[:1]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
