"""gloo and NCCL use the interface with the address that Ray uses for the node."""

import os
import socket
import subprocess
import sys

import psutil
import pytest

from raymm.actors.host.interfaces import interface_with, use_interface

NAMESPACES = ["unshare", "--uts", "--mount"]
# Script that names the host as Debian and Ubuntu do.
HOST = """
set -e
hostname raymm-node
printf '127.0.0.1 localhost\\n127.0.1.1 raymm-node\\n' > "$1"
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""
LISTEN = """
import sys
from datetime import timedelta
import psutil
import torch
from raymm.actors.rank import rendezvous
from raymm.actors.rank.rendezvous_store import RendezvousStore

rendezvous.use_interface(sys.argv[1])
timeouts = rendezvous.Timeouts.of(20.0, None)
store = RendezvousStore(0, timeouts.wait)
with store.opened({0: (0,)}, {}):
    rendezvous.Rendezvous(torch.device("cpu"), store, 0, 1, timeouts)._gloo_devices
connections = psutil.Process().net_connections("tcp")
print(*sorted({each.laddr.ip for each in connections if each.status == "LISTEN"}))
"""


@pytest.fixture
def on_host(tmp_path):
    if os.geteuid() or subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("namespaces need root")

    def run(*command: str) -> str:
        hosts = str(tmp_path / "hosts")
        inside = [*NAMESPACES, "sh", "-c", HOST, "sh", hosts, *command]
        result = subprocess.run(inside, capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    return run


def addresses():
    kinds = (socket.AF_INET, socket.AF_INET6)
    return [
        (name, each.address.partition("%")[0])
        for name, of_interface in psutil.net_if_addrs().items()
        for each in of_interface if each.family in kinds
    ]  # fmt: skip


@pytest.mark.system
def test_gloo_listens_on_rays_address_of_the_node(on_host):
    assert on_host("getent", "ahostsv4", "raymm-node").startswith("127.0.1.1 ")
    listened = [address for _, address in addresses() if "." in address]
    assert "127.0.0.1" in listened
    for address in listened:
        assert on_host(sys.executable, "-c", LISTEN, address) == address


def test_every_address_names_an_interface_that_has_it(monkeypatch):
    assert addresses()
    for _, address in addresses():
        name = interface_with(address)
        assert (name, address) in addresses()
        monkeypatch.setattr(os, "environ", {})
        use_interface(address)
        assert os.environ == {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}


def test_variables_of_the_user_stay(monkeypatch):
    variables = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib"}
    monkeypatch.setattr(os, "environ", dict(variables))
    use_interface("127.0.0.1")
    assert os.environ == variables


def test_an_address_of_no_interface_changes_nothing(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    use_interface("192.0.2.77")
    assert os.environ == {}
