"""gloo and NCCL use the interface with the address that Ray uses for the node."""

from __future__ import annotations

import ast
import os
import queue
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import distributed_c10d

from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.rank_spec import RankSpec
from raymm.actors.rank.rendezvous import (
    EVERYONE,
    News,
    RendezvousActor,
    RendezvousStore,
    Timeouts,
    interface_with,
    peers,
    use_interface,
)
from raymm.scheduler.plan.rendezvous_order import rendezvous_order

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
from raymm.actors.rank.rendezvous import RendezvousStore

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


PROCESSES = 6
PATIENCE = timedelta(seconds=20)


class Actor:
    """Handle of an actor: a call returns immediately, and runs in order in a separate thread."""

    def __init__(self, number: int) -> None:
        self.store = RendezvousStore(number, PATIENCE, generation=3)
        self.receive_news, self.calls = self, 0
        self._queue: queue.Queue[Sequence[News] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def remote(self, news: Sequence[News], generation: int) -> None:
        assert generation == self.store.generation
        self.calls += 1
        self._queue.put(news)

    def _work(self) -> None:
        while (news := self._queue.get()) is not None:
            self.store.receive_news(news)

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()


def meet(me: int, actors: Sequence[Actor], groups: dict[int, tuple[int, ...]]) -> None:
    """Join groups as gloo does: every member sets its address and reads all of them."""
    own = {number: members for number, members in groups.items() if me in members}
    known = {n: actors[n] for n in peers(me, own.values())}
    store = actors[me].store
    with store.opened(own, known):
        for number in sorted(own):
            with store.making(number):
                for text in ("asks", b"answers"):  # several rounds of one group
                    prefixed = dist.PrefixStore(f"{number}/{len(text)}", store)
                    prefixed.set(str(me), text)
                    for member in own[number]:
                        prefixed.wait([str(member)], PATIENCE)
                        expected = text if isinstance(text, bytes) else text.encode()
                        assert prefixed.get(str(member)) == expected


members = st.sets(st.integers(0, PROCESSES - 1), min_size=2).map(tuple)


@settings(deadline=None, max_examples=30)
@given(st.lists(members, max_size=8))
def test_all_members_of_all_groups_meet(sets) -> None:
    everyone = tuple(range(PROCESSES))
    groups = {EVERYONE: everyone}
    groups |= {n: sets[i] for n, i in enumerate(rendezvous_order(sets), start=1)}
    actors = [Actor(number) for number in everyone]
    errors: list[BaseException] = []

    def run(me: int) -> None:
        try:
            meet(me, actors, groups)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(me,)) for me in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for actor in actors:
        actor.end()
    assert not errors, errors
    for me, actor in enumerate(actors):
        own = [number for number, of_group in groups.items() if me in of_group]
        assert actor.store.num_keys() == sum(2 * len(groups[number]) for number in own)
        # Received calls: none of other groups, at most two keys per member of its groups.
        assert actor.calls <= sum(2 * (len(groups[number]) - 1) for number in own)


def test_a_process_knows_only_the_first_members() -> None:
    assert peers(0, [range(1000)]) == set(range(1, 1000))
    assert peers(7, [range(1000), (7, 9), (3, 7, 8)]) == {0, 9, 3}
    counts = Counter(len(peers(me, [range(1000), (me, me + 1)])) for me in range(1, 900))
    assert counts == {2: 899}


def test_missing_members_are_named_in_time() -> None:
    store = RendezvousStore(1, timedelta(seconds=60))
    with pytest.raises(dist.DistStoreError, match="no process has set 0/3"):
        store.wait(["0/3"], timedelta(seconds=0.01))
    store.receive_news([News(4, 3, "0/3", b"there")])  # before this process creates any group
    assert store.get("0/3") == b"there" and store.check(["0/3"]) and not store.check(["0/4"])


def listening_ports(pid: int) -> set[tuple[str, int]]:
    """Return where a process listens, on any interface, as a local client would reach it."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(file.readlink()))
        except OSError:
            continue
    found = set()
    for table, host in (("tcp", "127.0.0.1"), ("tcp6", "::1")):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add((host, int(fields[1].rpartition(":")[2], 16)))
    return found


# Script that knows the addresses of listeners, and nothing else. Prints where it was accepted.
STRANGER = """
import ast, os, sys, threading
from datetime import timedelta
import torch.distributed as dist

def join(host, port):
    try:
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=3))
        store.set("from a stranger", "a value")
        if store.get("from a stranger") == b"a value":
            found.append((host, port))
    except Exception:
        pass

found = []
tries = [threading.Thread(target=join, args=a, daemon=True) for a in ast.literal_eval(sys.argv[1])]
for one in tries:
    one.start()
for one in tries:
    one.join(5)  # who listens for something else does not answer
print(found, flush=True)
os._exit(0)
"""


def joined(ports: set[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the addresses where a stranger can write to a store."""
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, repr(sorted(ports))], capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    return ast.literal_eval(done.stdout)


def test_a_stranger_who_scans_ports_finds_no_store(ray_cluster) -> None:
    specs = [RankSpec(rank, 2, {}, edges=()) for rank in range(2)]
    group = RankGroup(specs, ["nothing"] * 2, RankResources(1.0))
    # Positive control: a store that the stranger can access.
    planted = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        ports = {port for one in group.pids() for port in listening_ports(one["pid"])}
        assert ports  # gloo's, and those of Ray's workers
        assert joined({*ports, ("127.0.0.1", planted.port)}) == [("127.0.0.1", planted.port)]
    finally:
        group.shutdown()


def test_torch_uses_only_supported_store_operations() -> None:
    """Check that gloo and NCCL set, read and wait; a single process calls itself."""
    store = RendezvousStore(0, timedelta(seconds=10))
    before = distributed_c10d._world.group_count
    with store.opened({EVERYONE: (0,)}, {}):
        group = dist.ProcessGroupGloo(
            dist.PrefixStore("alone", store), 0, 1, timedelta(seconds=10)
        )
    assert group.size() == 1 and store.num_keys() and distributed_c10d._world.group_count == before


def test_keys_of_another_rendezvous_are_separate() -> None:
    """Delay keys of a future rendezvous, and drop late ones of an earlier one."""
    timeouts = Timeouts.of(5.0, None)
    actor = RendezvousActor(1, "cpu", timeouts)
    actor.receive_news([News(EVERYONE, 0, "0/0", b"first")])
    actor.receive_news([News(EVERYONE, 0, "0/0", b"second")], 1)
    for generation, value in enumerate([b"first", b"second"]):
        with actor._meeting({EVERYONE: (0, 1)}, {}, generation):
            assert actor._store.get("0/0") == value
    actor.receive_news([News(EVERYONE, 0, "0/0", b"late")], 0)
    assert actor._store.get("0/0") == b"second" and actor._store.num_keys() == 1
