"""Rendezvous of processes: the default process group, further groups and links, and their
actors."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from raymm.actors.faults.flight_recorder import record_flight
from raymm.actors.faults.nccl_errors import only_abort
from raymm.actors.faults.observed_actor import ObservedActor
from raymm.actors.host.interfaces import use_interface
from raymm.actors.rank.rendezvous_store import News, RendezvousStore
from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import PointToPoint, receive_from, send_to, wait

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
