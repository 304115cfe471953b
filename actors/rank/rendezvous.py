"""Rendezvous of processes: the default process group, further groups and links, their actors, and
the key-value store whose keys travel as calls of Ray actors.

Torch's TCPStore listens on a port without authentication: any client that reaches it can join a run
or overwrite values. A secret in the key names would not help, because keys travel in the clear and
some operations need no key. Actor calls have Ray's authentication and need no additional port.

Every process holds its own copy of the keys that concern it. A process that sets a key sends it to
the first member of the group that is being created, which sends it to all others. So no process
polls, and none needs another process's thread. Actor handles are held only while groups are
created, because a handle keeps an unused actor alive.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, distributed_c10d
from torch.distributed.distributed_c10d import Store

from raymm.actors.faults.cut import only_abort
from raymm.actors.faults.observed_actor import ObservedActor
from raymm.actors.faults.stacks import record_flight
from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import (
    PointToPoint,
    receive_from,
    send_to,
    wait,
    waits_for_others,
)


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


EVERYONE = 0
"""Number of the group of all processes."""


class News(NamedTuple):
    """A key that a process has set while a group was created."""

    group: int
    setter: int
    key: str
    value: bytes


def peers(me: int, groups: Iterable[Sequence[int]]) -> set[int]:
    """Return the receivers of a process's keys: all other members of the groups in which the
    process is the first member, and the first member of each other group."""
    receivers: set[int] = set()
    for members in groups:
        receivers.update(members if members[0] == me else members[:1])
    return receivers - {me}


class RendezvousStore(Store):
    """Store of one process; ``generation`` is the number of earlier rendezvous.

    Each key is set once, by one process. Torch uses no other operation while it creates groups;
    ``TORCH_DIST_INIT_BARRIER``, which would need counters, cannot be set.
    """

    def __init__(self, me: int, timeout: timedelta, generation: int = 0) -> None:
        super().__init__()
        self._me, self._patience, self.generation = me, timeout, generation
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._group = EVERYONE
        self._members: dict[int, Sequence[int]] = {}
        self._actors: Mapping[int, Any] = {}
        # for other members of groups in which this process is the first member
        self._news: list[News] = []
        self._open = False

    @contextmanager
    def opened(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any]
    ) -> Iterator[None]:
        """Forward keys to other processes for the length of the block.

        At the end all keys of this process have been sent. All members of a group that has been
        used have received the keys that they waited for.
        """
        with self._changed:
            self._members, self._actors, self._open = dict(members), actors, True
        sender = threading.Thread(target=self._send_news, name="meeting", daemon=True)
        sender.start()
        try:
            yield
        finally:
            with self._changed:
                self._open = False
                self._changed.notify_all()
            sender.join()
            self._actors = {}

    @contextmanager
    def making(self, group: int) -> Iterator[None]:
        """Associate the keys that are set in the block with a group."""
        self._group = group
        try:
            yield
        finally:
            self._group = EVERYONE

    def receive_news(self, news: Sequence[News]) -> None:
        """Store keys that other processes have set; callable from any thread, also before
        :meth:`opened`."""
        with self._changed:
            self._values.update({each.key: each.value for each in news})
            # The other keys have already reached every process that needs them.
            self._news += [each for each in news if each.group not in self._members or (
                self._passes_on(each)
            )]
            self._changed.notify_all()

    def _passes_on(self, news: News) -> bool:
        members = self._members[news.group]
        return members[0] == self._me and any(m not in (self._me, news.setter) for m in members)

    def _send_news(self) -> None:
        """Forward all new keys in one call per process; further keys arrive during the calls."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or self._sendable())
                if not (news := self._sendable()):
                    return
                self._news = [each for each in self._news if each.group not in self._members]
            for group in {each.group for each in news}:
                for member in self._members[group][1:]:
                    news_for_member = [e for e in news if e.group == group and e.setter != member]
                    if news_for_member:
                        self._tell(member, news_for_member)

    def _tell(self, member: int, news: Sequence[News]) -> None:
        self._actors[member].receive_news.remote(news, self.generation)

    def _sendable(self) -> list[News]:
        return [
            each for each in self._news if each.group in self._members and self._passes_on(each)
        ]

    # Interface that torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        value = value.encode() if isinstance(value, str) else bytes(value)
        news = News(self._group, self._me, key, value)
        with self._changed:
            self._values[key] = value
            first = self._members[news.group][0] if self._open else self._me
            if self._open and first == self._me:
                self._news.append(news)
            self._changed.notify_all()
        if first != self._me:
            self._tell(first, [news])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    @waits_for_others
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: a timeout; names the missing keys.
        """
        patience = self._patience if timeout is None else timeout
        with self._changed:
            all_set = self._changed.wait_for(lambda: self.check(keys), patience.total_seconds())
            if not all_set:
                missing = [key for key in keys if key not in self._values]
                raise DistStoreError(f"no process has set {', '.join(missing)}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        return len(self._values)

    def has_extended_api(self) -> bool:
        """Return False: append and queue operations are not supported."""
        return False

    def clone(self) -> RendezvousStore:
        return self


# Factor of the watchdog's timeout over the timeout for other processes.
WATCHDOG_TIMES = 2.0


class Timeouts(NamedTuple):
    """Timeouts for operations between processes.

    Attributes:
        wait: for any operation, and for other processes to arrive. The driver then names the late
            one.
        watchdog: time until NCCL's watchdog ends a process because of a GPU operation. Longer than
            ``wait``, because the watchdog cannot name the process at fault; it ends processes that
            the driver cannot reach.
    """

    wait: timedelta
    watchdog: timedelta

    @classmethod
    def of(cls, wait_s: float, watchdog_s: float | None) -> Timeouts:
        """Create from seconds; ``watchdog_s`` defaults to :data:`WATCHDOG_TIMES` times
        ``wait_s``."""
        watchdog_s = WATCHDOG_TIMES * wait_s if watchdog_s is None else watchdog_s
        return cls(timedelta(seconds=wait_s), timedelta(seconds=watchdog_s))


def prepare_nccl(device: torch.device) -> None:
    """Set environment variables that NCCL and CUDA read once; keep those that are set. Call this
    before the first GPU allocation."""
    if device.type != "cuda":
        return
    # Freed memory can be remapped, so tensors of many sizes do not fragment it.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # Use the most hardware queues possible: streams that share a queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Messages of a group are serialized on purpose: the program defines their order.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    only_abort()
    record_flight()


class Rendezvous:
    """Rendezvous of a process with others. The constructor joins the default group of all
    processes; methods create further groups, connected over NCCL on GPUs and over gloo otherwise.

    Only its members create a group. ``torch.distributed.new_group`` must be called by all processes
    for every group, thousands of times in a large run. Members identify a group by a number that
    all processes agree on. Torch's counter, which ``use_local_synchronization`` also uses, counts
    the calls of one process and differs among members.

    Attributes:
        device: as given, with an index, which NCCL needs.

    Raises:
        ChannelError: not all processes arrived within the timeout.
    """

    def __init__(
        self, device: torch.device, store: RendezvousStore, rank: int, world_size: int,
        timeouts: Timeouts,
    ) -> None:  # fmt: skip
        on_gpu = device.type == "cuda"
        if on_gpu:
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        self.device, self.timeouts, self._store = device, timeouts, store
        with _meeting(range(world_size), timeouts.wait):
            # The group is not bound to the device. Torch would then create subgroups by splitting
            # it, which all processes would have to join.
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size,
                timeout=timeouts.watchdog if on_gpu else timeouts.wait,
            )
            everyone = dist.group.WORLD
            assert everyone is not None
            _meet(everyone, device)

    def new_group(self, number: int, ranks: Sequence[int]) -> dist.ProcessGroup:
        """Create and connect a group of processes.

        Exactly the members must call this, each in the order of its groups' numbers. An all-reduce
        connects them here, so that no step has to wait for a connection.

        Args:
            number: number of the group among all groups of all processes, from 1.
            ranks: process numbers in the default group.

        Raises:
            ChannelError: not all members arrived within the timeout.
        """
        with _meeting(ranks, self.timeouts.wait), self._store.making(number):
            group = self._new_group(2 * number, ranks)
            _meet(group, self.device)
        return group

    def new_host_group(
        self, number: int, ranks: Sequence[int], group: dist.ProcessGroup
    ) -> dist.ProcessGroup:
        """Create a group for values in host memory, like :meth:`new_group`. On CPUs return
        ``group``, which has the same processes."""
        if self.device.type != "cuda":
            return group
        with _meeting(ranks, self.timeouts.wait), self._store.making(number):
            group = self._new_group(2 * number + 1, ranks, "gloo")
            _meet(group, torch.device("cpu"))
        return group

    def new_link(
        self, number: int, sender: int, receiver: int, ctas: int
    ) -> tuple[PointToPoint, PointToPoint]:
        """Create the link for messages from one process to another, like :meth:`new_group`, and
        test it.

        Args:
            ctas: on a GPU, largest number of multiprocessors that a message may occupy.

        Returns:
            The group for device tensors, and the group for host memory (the same one on CPUs).
        """
        ends = sender, receiver
        with _meeting(ends, self.timeouts.wait), self._store.making(number):
            if self.device.type == "cuda":
                group: PointToPoint = self._new_group(2 * number, ends, ctas=ctas)
                host_group = self._new_host_link(number, ends)
            else:
                group = host_group = self._new_host_link(number, ends)
            tensor = torch.full((1,), dist.get_rank(), device=self.device)
            operation = send_to if dist.get_rank() == sender else receive_from
            wait(operation(group, 1 - group.rank(), 0, tensor))
            if int(tensor) != sender:  # read: waits until it is there
                raise ChannelError(
                    f"process {receiver} received {int(tensor)} from process {sender}; "
                    f"expected {sender}"
                )
        return group, host_group

    def _new_host_link(self, number: int, ends: tuple[int, int]) -> PointToPoint:
        """Create a gloo group without the dispatcher of torch's groups. All links share one I/O
        thread: with one thread per link, processes mostly switch between threads."""
        gloo: Any = dist.ProcessGroupGloo  # torch's stubs declare another constructor
        options = gloo._Options()
        options._devices, options._threads = self._gloo_devices, 1
        options._timeout = self.timeouts.wait
        store = distributed_c10d.PrefixStore(f"link {number}/", self._store)
        return gloo(store, ends.index(dist.get_rank()), len(ends), options)

    @cached_property
    def _gloo_devices(self) -> list[Any]:
        """Return gloo devices for the network interfaces that torch's groups use."""
        names = os.environ.get("GLOO_SOCKET_IFNAME")
        gloo = dist.ProcessGroupGloo
        if names:
            return [gloo.create_device(interface=name) for name in names.split(",")]
        return [gloo.create_default_device()]

    def _new_group(
        self, name: int, ranks: Sequence[int], backend: str | None = None, ctas: int | None = None
    ) -> dist.ProcessGroup:
        on_gpu = self.device.type == "cuda" and backend != "gloo"
        timeout = self.timeouts.watchdog if on_gpu else self.timeouts.wait
        options: Any = None
        if on_gpu and ctas is not None:
            # Separate streams with a higher priority than the device's other work.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = ctas
            options._timeout = timeout
        # Torch names the next group by this counter; it must be the same for all members.
        distributed_c10d._world.group_count = name
        group = dist.new_group(
            list(ranks), timeout=timeout, backend=backend, pg_options=options,
            device_id=self.device if on_gpu else None,  # connects at once, not at the first use
        )
        return cast(dist.ProcessGroup, group)


def _meet(group: dist.ProcessGroup, device: torch.device) -> None:
    members = torch.ones(1, device=device)
    dist.all_reduce(members, group=group)
    if (met := int(members)) != group.size():  # read: waits until it is done
        raise ChannelError(f"only {met} of the {group.size()} processes of a group connected")


@contextmanager
def _meeting(ranks: Sequence[int], timeout: timedelta) -> Iterator[None]:
    try:
        yield
    except (ChannelError, torch.AcceleratorError):  # an AcceleratorError is this process's own
        raise
    except RuntimeError as error:
        raise ChannelError(
            f"processes {_few(ranks)} did not connect within {timeout.total_seconds():g} s "
            f"(timeout_s): {error}"
        ) from error


def _few(ranks: Sequence[int]) -> str:
    listed = [str(rank) for rank in ranks[:4]]
    return ", ".join(listed) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


class RendezvousActor(ObservedActor):
    """Base class of actors that create process groups with each other.

    Args:
        describe: returns the text of an instruction of the actor's programs.
    """

    answers = (*ObservedActor.answers, "receive_news")

    def __init__(
        self, number: int, device: str, timeouts: Timeouts, describe: Callable[[Any], str] = str
    ) -> None:
        super().__init__(device, describe)
        self._timeouts, self._number = timeouts, number
        self._store = RendezvousStore(number, timeouts.wait)
        # Stores of later rendezvous: other processes may arrive before this one.
        self._stores = {self._store.generation: self._store}
        self._changing = threading.Lock()

    def receive_news(self, news: Sequence[News], generation: int = 0) -> None:
        """Store keys of a rendezvous that other processes have set."""
        if (store := self._store_of(generation)) is not None:
            store.receive_news(news)

    def _store_of(self, generation: int) -> RendezvousStore | None:
        """Return the store of a rendezvous; None if the rendezvous is over."""
        with self._changing:
            if generation < self._store.generation:
                return None
            store = self._stores.get(generation)
            if store is None:
                store = RendezvousStore(self._number, self._timeouts.wait, generation)
                self._stores[generation] = store
            return store

    @contextmanager
    def _meeting(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any], generation: int = 0
    ) -> Iterator[None]:
        """Open the store of a rendezvous, so that groups can be created in the block."""
        store = self._store_of(generation)
        assert store is not None
        with self._changing:
            self._store = store
            self._stores = {n: each for n, each in self._stores.items() if n >= generation}
        if actors:
            import ray

            use_interface(ray.util.get_node_ip_address())
        with self._store.opened(members, actors):
            yield
