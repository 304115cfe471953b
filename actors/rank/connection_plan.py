"""What each process connects before its first step, as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.scheduler.plan.meeting_order import meeting_order
from raymm.scheduler.plan.process_grid import P2PGroup, connected_pairs
from raymm.scheduler.plan.stage import Edge

MESSAGE_CTAS = 32
"""Multiprocessors that all messages under way may occupy together, of a GPU's 108 or more: receives
that were posted ahead hold theirs until the message is there."""
LINK_CTAS = 8
"""Those that one message may occupy at most."""


class Meeting(NamedTuple):
    """Processes that make a group together.

    Attributes:
        number: in the order in which every process makes its own; from 1, the group of all
            processes is made before.
        members: the processes. Of a link, the sender and the receiver.
        is_link: whether it is for messages from the first to the second.
        sums: whose gradients are summed in it; None: it is for what processes of a rank share.
    """

    number: int
    members: tuple[int, ...]
    is_link: bool = False
    sums: ReductionGroup | None = None


@dataclass(frozen=True)
class ConnectionPlan:
    """What one process connects: groups that it is a member of, and its channels.

    Attributes:
        meetings: its groups, by number.
        p2p_groups: of its directed edges of messages, the edge, a number that is the edge's
            everywhere, and who has the messages.
        link_ctas: on a GPU, multiprocessors that a message may occupy.
    """

    meetings: tuple[Meeting, ...] = ()
    p2p_groups: tuple[tuple[Edge, int, P2PGroup], ...] = ()
    link_ctas: int = LINK_CTAS


def connection_plans(
    processes: int,
    p2p_groups: Sequence[tuple[Edge, Sequence[P2PGroup]]],
    groups: Sequence[tuple[int, ...]] = (),
    reductions: Sequence[ReductionGroup] = (),
) -> tuple[ConnectionPlan, ...]:
    """Every process's, in one pass.

    Edges with messages from one process to the same other share a link. There are as many links
    as ordered pairs of processes with messages, so that what a process sends, or receives from one
    process, need not wait for what it receives from another.

    Args:
        processes: how many there are.
        p2p_groups: of every directed edge of messages between ranks, which processes have them.
        groups: every group of several processes of a rank.
        reductions: all groups of processes that hold parameters together.
    """
    pairs = connected_pairs(p2p_groups)
    unnumbered = [
        *(Meeting(0, members) for members in groups),
        *(Meeting(0, pair, is_link=True) for pair in pairs),
        *(Meeting(0, reduction.processes, sums=reduction) for reduction in reductions),
    ]
    meetings: list[list[Meeting]] = [[] for _ in range(processes)]
    order = meeting_order([meeting.members for meeting in unnumbered])
    for number, place in enumerate(order, start=1):
        meeting = unnumbered[place]._replace(number=number)
        for process in meeting.members:
            meetings[process].append(meeting)
    channels: list[list[tuple[Edge, int, P2PGroup]]] = [[] for _ in range(processes)]
    for number, (edge, of_edge) in enumerate(p2p_groups):
        for p2p_group in of_edge:
            for process in {*p2p_group.senders, *p2p_group.receivers}:
                channels[process].append((edge, number, p2p_group))
    ctas = link_ctas(pairs)
    return tuple(
        ConnectionPlan(tuple(own), tuple(of_process), ctas)
        for own, of_process in zip(meetings, channels, strict=True)
    )


def link_ctas(pairs: Sequence[tuple[int, int]] | dict[tuple[int, int], None]) -> int:
    """Multiprocessors that a message may occupy on a GPU, alike for all links, such that messages
    on all links of any process leave the rest to its other work."""
    links: dict[int, int] = {}
    for pair in pairs:
        for process in pair:
            links[process] = links.get(process, 0) + 1
    return max(1, min(LINK_CTAS, MESSAGE_CTAS // max(links.values(), default=1)))
