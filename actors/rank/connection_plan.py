"""Plan of the groups and channels that each process connects before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.scheduler.plan.process_grid import P2PGroup, connected_pairs
from raymm.scheduler.plan.rendezvous_order import rendezvous_order
from raymm.scheduler.plan.stage import Edge

MESSAGE_CTAS = 32
"""Multiprocessors that all messages in flight may occupy. Receives posted early hold theirs too."""
LINK_CTAS = 8
"""Largest number of multiprocessors that one message may occupy."""


class RendezvousRound(NamedTuple):
    """Processes that create a process group together.

    Attributes:
        number: position in the order in which every process creates its groups, from 1.
        members: process numbers; for a link, (sender, receiver).
        is_link: True if the group carries messages from the first member to the second.
        sums: parameters whose gradients the group sums; None if it connects processes of one rank.
    """

    number: int
    members: tuple[int, ...]
    is_link: bool = False
    sums: ReductionGroup | None = None


@dataclass(frozen=True)
class ConnectionPlan:
    """Groups and channels that one process connects.

    Attributes:
        p2p_groups: (directed edge, number of the edge on all processes, senders and receivers).
        link_ctas: multiprocessors of a GPU that one message may occupy.
    """

    rounds: tuple[RendezvousRound, ...] = ()
    p2p_groups: tuple[tuple[Edge, int, P2PGroup], ...] = ()
    link_ctas: int = LINK_CTAS


def connection_plans(
    processes: int,
    p2p_groups: Sequence[tuple[Edge, Sequence[P2PGroup]]],
    groups: Sequence[tuple[int, ...]] = (),
    reductions: Sequence[ReductionGroup] = (),
) -> tuple[ConnectionPlan, ...]:
    """Return the connection plan of every process.

    Edges with messages from one process to the same other process share a link. Each ordered pair
    of processes has its own link, so a send or a receive never waits for a receive from another
    process.
    """
    pairs = connected_pairs(p2p_groups)
    unnumbered = [
        *(RendezvousRound(0, members) for members in groups),
        *(RendezvousRound(0, pair, is_link=True) for pair in pairs),
        *(RendezvousRound(0, reduction.processes, sums=reduction) for reduction in reductions),
    ]
    rounds: list[list[RendezvousRound]] = [[] for _ in range(processes)]
    order = rendezvous_order([meeting.members for meeting in unnumbered])
    for number, index in enumerate(order, start=1):
        meeting = unnumbered[index]._replace(number=number)
        for process in meeting.members:
            rounds[process].append(meeting)
    channels: list[list[tuple[Edge, int, P2PGroup]]] = [[] for _ in range(processes)]
    for number, (edge, edge_groups) in enumerate(p2p_groups):
        for p2p_group in edge_groups:
            for process in {*p2p_group.senders, *p2p_group.receivers}:
                channels[process].append((edge, number, p2p_group))
    ctas = link_ctas(pairs)
    return tuple(
        ConnectionPlan(tuple(process_rounds), tuple(process_channels), ctas)
        for process_rounds, process_channels in zip(rounds, channels, strict=True)
    )


def link_ctas(pairs: Sequence[tuple[int, int]] | dict[tuple[int, int], None]) -> int:
    """Return the multiprocessors of a GPU that one message may occupy: the same for all links, and
    few enough that computation keeps the rest when all links of a process are busy."""
    links: dict[int, int] = {}
    for pair in pairs:
        for process in pair:
            links[process] = links.get(process, 0) + 1
    return max(1, min(LINK_CTAS, MESSAGE_CTAS // max(links.values(), default=1)))
