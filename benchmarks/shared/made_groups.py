"""Process groups that real processes create over gloo on this machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.shared.tcp_rendezvous import LOCAL, TIMEOUT, TcpRendezvousStore
from raymm.actors.rank.rank_spec import ConnectionPlan, RendezvousRound
from raymm.actors.rank.rendezvous import Rendezvous, Timeouts


class CountedRendezvousStore(TcpRendezvousStore):
    """Store that counts its operations."""

    operations = 0

    def set(self, key: str, value: bytes | str) -> None:
        self.operations += 1
        super().set(key, value)

    def get(self, key: str) -> bytes:
        """Return the value of a key once it is set."""
        self.operations += 1
        return super().get(key)


def _make(me: int, plans: Sequence[ConnectionPlan], port: int, own: bool, results: Any) -> None:
    torch.set_num_threads(1)
    store = CountedRendezvousStore(me, len(plans), port)
    place = Rendezvous(
        torch.device("cpu"), store, me, len(plans), Timeouts.of(TIMEOUT.total_seconds(), None)
    )
    every = sorted({m for plan in plans for m in plan.rounds}, key=lambda m: m.number)
    dist.barrier()
    store.operations, begin = 0, time.perf_counter()
    calls = 0
    for meeting in plans[me].rounds if own else every:
        calls += 1
        if own:
            _own(place, meeting)
        else:  # torch's own operations
            group = dist.new_group(list(meeting.members), timeout=timedelta(seconds=60))
            if me in meeting.members:
                dist.all_reduce(torch.ones(1), group=group)
    results.put((me, calls, store.operations, time.perf_counter() - begin))
    dist.barrier()  # the store of the first process serves all


def _own(place: Rendezvous, meeting: RendezvousRound) -> None:
    if meeting.is_link:
        place.new_link(meeting.number, *meeting.members, ctas=1)
    else:
        place.new_group(meeting.number, meeting.members)


def made(plans: Sequence[ConnectionPlan], own: bool) -> tuple[int, int, float]:
    """Create the groups of the plans in one process each.

    Args:
        plans: one per process.
        own: True if each process creates only its own groups; otherwise all processes take part in
            all, as torch's ``new_group`` requires.

    Returns:
        Calls and store operations, each of the process with the most, and seconds of the slowest.
    """
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    processes = [
        context.Process(target=_make, args=(me, plans, port, own, results))
        for me in range(len(plans))
    ]
    for process in processes:
        process.start()
    rows = [results.get(timeout=TIMEOUT.total_seconds()) for _ in processes]
    for process in processes:
        process.join()
    return max(r[1] for r in rows), max(r[2] for r in rows), max(r[3] for r in rows)
