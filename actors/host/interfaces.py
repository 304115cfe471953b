"""Network interface that gloo and NCCL use between processes."""

from __future__ import annotations

import os
import socket


def use_interface(address: str) -> None:
    """Make gloo and NCCL listen on the interface with an address. Call this before the first
    process group is created.

    By default, gloo listens on the address that the host name resolves to, which is 127.0.1.1 with
    the ``/etc/hosts`` of Debian and Ubuntu, and NCCL on the first interface that is up. Ray knows
    every node by an address that other nodes can reach.

    Environment variables that are already set are kept. If no interface has the address, as behind
    address translation, nothing is changed.
    """
    name = interface_with(address)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        # without "=", NCCL also matches names with this prefix
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def interface_with(address: str) -> str | None:
    """Return the name of the interface with an address; None if no interface has it."""
    import psutil  # installed with Ray; processes without Ray may lack it

    kinds = (socket.AF_INET, socket.AF_INET6)
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in kinds and each.address.partition("%")[0] == address:
                return name
    return None
