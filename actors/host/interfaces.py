"""Network interface over which gloo and NCCL connect processes."""

from __future__ import annotations

import os
import socket


def use_interface(address: str) -> None:
    """Make gloo and NCCL listen on the interface that has an address; call this before the first
    process group is made.

    Left to itself, gloo listens on the address that the host name resolves to, which is 127.0.1.1
    with the ``/etc/hosts`` of Debian and Ubuntu, and NCCL on the first interface that is up. Ray
    knows every node by an address that other nodes reach.

    Environment variables that are set stay as they are. So does everything if no interface has the
    address, as behind a translated address.

    Args:
        address: IPv4 or IPv6 address of this host, as Ray knows it.
    """
    name = interface_with(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # else names that begin like it


def interface_with(address: str) -> str | None:
    """Return the name of the interface that has an address; None if no interface has it."""
    import psutil  # comes with Ray; a process that meets others without Ray may lack it

    kinds = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in kinds and each.address.partition("%")[0] == address:
                return name
    return None
