"""Where processes meet before they talk to one another, and the actors that do."""

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
from raymm.actors.rank.meeting_store import MeetingStore, News
from raymm.errors import ChannelError
from raymm.kernels.collectives.waiting import PointToPoint, receive_from, send_to, wait

# NCCL's watchdog waits so many times as long as processes wait for each other.
WATCHDOG_TIMES = 2.0


class Timeouts(NamedTuple):
    """How long processes wait for each other.

    Attributes:
        wait: for any operation, and for others to come; what is late is asked about, and named.
        watchdog: until an operation on a GPU counts as failed, and its process ends. Longer, as
            NCCL's watchdog cannot name the culprit: for processes that the driver cannot reach.
    """

    wait: timedelta
    watchdog: timedelta

    @classmethod
    def of(cls, wait_s: float, watchdog_s: float | None) -> Timeouts:
        """Of seconds; without a watchdog's, :data:`WATCHDOG_TIMES` as long."""
        watchdog_s = WATCHDOG_TIMES * wait_s if watchdog_s is None else watchdog_s
        return cls(timedelta(seconds=wait_s), timedelta(seconds=watchdog_s))


def prepare_nccl(device: torch.device) -> None:
    """Settings that NCCL and CUDA read once, unless they are set; before anything is on a GPU."""
    if device.type != "cuda":
        return
    # What is freed can be mapped anew: memory of many sizes does not break into pieces.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    # As many hardware queues as there can be: streams that share one wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Messages of a group follow one another: that is what the program's order is for.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "0")
    only_abort()
    record_flight()


class MeetingPlace:
    """Where a process meets others: in the group of all, which it joins here, and in groups that it
    makes with some. Groups are connected: over NCCL on GPUs, over gloo else.

    Only its members make a group, and nothing waits for others (``torch.distributed.new_group`` is
    for all processes to call, for every group: thousands of calls in a large run). They know it
    by a number that all processes agree on: torch's own count is of the calls of a process, and so
    is the name that ``use_local_synchronization`` makes, which then differs among members that
    have made different numbers of groups.

    Args:
        device: of this process's tensors.
        store: where processes find one another.
        rank: this process's number.
        world_size: how many there are.
        timeouts: of every operation, and for others to come.

    Attributes:
        device: with its number, which NCCL connects.
        timeouts: as given.

    Raises:
        ChannelError: not all came within the timeout.
    """

    def __init__(
        self, device: torch.device, store: MeetingStore, rank: int, world_size: int,
        timeouts: Timeouts,
    ) -> None:  # fmt: skip
        on_gpu = device.type == "cuda"
        if on_gpu:
            device = torch.device("cuda", device.index or 0)
            torch.cuda.set_device(device)
        self.device, self.timeouts, self._store = device, timeouts, store
        with _meeting(range(world_size), timeouts.wait):
            # Not bound to the device: groups of some of the processes would then be split from
            # this one, for which all of them have to come.
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world_size,
                timeout=timeouts.watchdog if on_gpu else timeouts.wait,
            )
            everyone = dist.group.WORLD
            assert everyone is not None
            _meet(everyone, device)

    def new_group(self, number: int, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group of these processes, connected; to be called by all of them and no others. What
        a process is a member of, it must make in the order of the numbers.

        Its communicator is made here, and its first operation is one that all of its members take
        part in: what is left for a step to connect, a process would have to wait for in it.

        Args:
            number: of the group among all groups of all processes, from 1.
            ranks: processes, by their numbers in the default group.

        Raises:
            ChannelError: not all came within the timeout.
        """
        with _meeting(ranks, self.timeouts.wait), self._store.making(number):
            group = self._new_group(2 * number, ranks)
            _meet(group, self.device)
        return group

    def new_host_group(
        self, number: int, ranks: Sequence[int], group: dist.ProcessGroup
    ) -> dist.ProcessGroup:
        """What carries what the hosts of a group's processes are to agree on. Else as
        :meth:`new_group`.

        Args:
            number, ranks: as the group was made with.
            group: of the same processes; what is returned on CPUs.
        """
        if self.device.type != "cuda":
            return group
        with _meeting(ranks, self.timeouts.wait), self._store.making(number):
            group = self._new_group(2 * number + 1, ranks, "gloo")
            _meet(group, torch.device("cpu"))
        return group

    def new_link(
        self, number: int, sender: int, receiver: int, ctas: int
    ) -> tuple[PointToPoint, PointToPoint]:
        """What carries messages from one process to another, over which one has gone, and what
        carries what hosts are to read. Else as :meth:`new_group`.

        Args:
            number: of the link among all groups of all processes, from 1.
            sender, receiver: processes, by their numbers in the default group.
            ctas: on a GPU, multiprocessors that a message may occupy at most.
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
        """Gloo itself, without the dispatcher that torch's groups pass every operation through.
        All links of a process share the thread that moves their bytes; with one each, as torch's
        groups have, processes mostly wake threads."""
        gloo: Any = dist.ProcessGroupGloo  # of whose constructors torch declares another one
        options = gloo._Options()
        options._devices, options._threads = self._gloo_devices, 1
        options._timeout = self.timeouts.wait
        store = distributed_c10d.PrefixStore(f"link {number}/", self._store)
        return gloo(store, ends.index(dist.get_rank()), len(ends), options)

    @cached_property
    def _gloo_devices(self) -> list[Any]:
        """The network interfaces that torch's groups use, too."""
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
            # Streams of their own, which go before the device's other work.
            options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = ctas
            options._timeout = timeout
        # What torch calls the next group, the same for all of its members.
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
    except (ChannelError, torch.AcceleratorError):  # the latter is this process's own
        raise
    except RuntimeError as error:
        raise ChannelError(
            f"processes {_few(ranks)} did not connect within {timeout.total_seconds():g} s "
            f"(timeout_s): {error}"
        ) from error


def _few(ranks: Sequence[int]) -> str:
    listed = [str(rank) for rank in ranks[:4]]
    return ", ".join(listed) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


class MeetingActor(ObservedActor):
    """Base of such actors.

    Args:
        number: the process's.
        device: its kind.
        timeouts: of waits for others.
        describe: an instruction of its programs in words.
    """

    answers = (*ObservedActor.answers, "receive_news")

    def __init__(
        self, number: int, device: str, timeouts: Timeouts, describe: Callable[[Any], str] = str
    ) -> None:
        super().__init__(device, describe)
        self._timeouts, self._number = timeouts, number
        self._store = MeetingStore(number, timeouts.wait)
        # Those of meetings to come: others may be there before this process.
        self._stores = {self._store.generation: self._store}
        self._changing = threading.Lock()

    def receive_news(self, news: Sequence[News], generation: int = 0) -> None:
        """Take keys that others have set, while this one waits for them.

        Args:
            news: the keys.
            generation: of the meeting that they are of.
        """
        if (store := self._store_of(generation)) is not None:
            store.receive_news(news)

    def _store_of(self, generation: int) -> MeetingStore | None:
        """None of a meeting that is over."""
        with self._changing:
            if generation < self._store.generation:
                return None
            store = self._stores.get(generation)
            if store is None:
                store = MeetingStore(self._number, self._timeouts.wait, generation)
                self._stores[generation] = store
            return store

    @contextmanager
    def _meeting(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any], generation: int = 0
    ) -> Iterator[None]:
        """Within, groups can be made.

        Args:
            members: of the groups, by number.
            actors: of processes that are to be told keys.
            generation: of the meeting: how often processes have met before.
        """
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
