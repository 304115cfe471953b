"""What connects a process with others: every communicator that it will ever use, made before its
first step."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from raymm.actors.executor.channel import Link, RecvChannel, SendChannel
from raymm.actors.faults.whereabouts import Whereabouts
from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.actors.rank.meeting import Timeouts, new_group, new_link
from raymm.actors.rank.rank_spec import RankSpec
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.scheduler.graph.direction import Direction
from raymm.scheduler.plan.process_grid import P2PGroup, connected_pairs
from raymm.scheduler.plan.stage import Edge

MESSAGE_CTAS = 32
"""Multiprocessors that all messages under way may occupy together, of a GPU's 108 or more: receives
that were posted ahead hold theirs until the message is there."""
LINK_CTAS = 8
"""Those that one message may occupy at most."""


class Connections:
    """The groups of a process and its channels. All processes make all groups in one order, and
    each group has connected before the next is made.

    Edges with messages from one process to the same other share a link. There are as many links
    as ordered pairs of processes with messages, so that what a process sends, or receives from one
    process, need not wait for what it receives from another.

    Args:
        spec: the process's.
        device: of its tensors, with its number.
        timeouts: of every operation, and for the members of a group to come.
        whereabouts: is told which group is being connected.

    Attributes:
        data, samples, tokens, tensors: processes of its own rank, by what they share; None where it
            is the only one.
        senders, receivers: by directed edge.
        reductions: process groups that sum gradients.

    Raises:
        ChannelError: the members of a group did not come within the timeout; names them.
    """

    def __init__(
        self, spec: RankSpec, device: torch.device, timeouts: Timeouts, whereabouts: Whereabouts
    ) -> None:
        self._spec, self._device, self._timeouts = spec, device, timeouts
        self._whereabouts = whereabouts
        self._groups = {members: self._new_group(members) for members in spec.groups}
        process_groups = spec.process_groups
        self.data, self.samples, self.tokens = (
            Exchange(self._groups[group]) if group else None
            for group in (process_groups.data, process_groups.samples, process_groups.tokens)
        )
        self.tensors = (
            TensorGroup(self._groups[process_groups.tensors]) if process_groups.tensors else None
        )
        self._links = self._new_links()
        self.senders: dict[Edge, SendChannel] = {}
        self.receivers: dict[Edge, RecvChannel] = {}
        for number, (edge, p2p_groups) in enumerate(spec.p2p_groups):
            for p2p_group in p2p_groups:
                self._open_p2p_group(edge, number, p2p_group)
        self.reductions: dict[ReductionGroup, dist.ProcessGroup] = {
            members: self._new_group(members.processes) for members in spec.reduction_groups
        }

    def _connecting(self, ranks: Sequence[int]) -> None:
        if self._spec.rank in ranks:
            self._whereabouts.enter(f"connecting processes {', '.join(map(str, ranks))}")

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        self._connecting(ranks)
        return new_group(ranks, self._timeouts, self._device)

    def _new_links(self) -> dict[tuple[int, int], tuple[dist.ProcessGroup, dist.ProcessGroup]]:
        """By sender and receiver, the group for messages and the one for descriptions."""
        pairs = connected_pairs(self._spec.p2p_groups)
        ctas = link_ctas(pairs)
        links = {}
        for pair in pairs:
            self._connecting(pair)
            links[pair] = new_link(*pair, self._timeouts, self._device, ctas)
        return links

    def _open_p2p_group(self, edge: Edge, number: int, p2p_group: P2PGroup) -> None:
        me, device, resharding = self._spec.rank, self._device, p2p_group.resharding
        links: dict[int, Link] = {}
        for sender, receiver in resharding.links():
            ends = p2p_group.senders[sender], p2p_group.receivers[receiver]
            group, host_group = self._links[ends]
            if me == ends[0]:
                links[receiver] = Link(group, ends[1], number, host_group)
            elif me == ends[1]:
                links[sender] = Link(group, ends[0], number, host_group)
        if me in p2p_group.senders:
            # What goes back from another module is a gradient that every process which shares
            # the microbatch has a part of.
            gradient = p2p_group.direction is Direction.BACKWARD
            between = edge[0].module != edge[1].module
            summed = self.data.group if gradient and between and self.data else None
            self.senders[edge] = SendChannel(
                links, device, resharding, p2p_group.senders.index(me), summed
            )
        elif me in p2p_group.receivers:
            self.receivers[edge] = RecvChannel(
                links, device, self._timeouts.wait, resharding, p2p_group.receivers.index(me),
                self._groups.get(p2p_group.receivers), in_order=device.type == "cuda",
            )


def link_ctas(pairs: Sequence[tuple[int, int]] | dict[tuple[int, int], None]) -> int:
    """Multiprocessors that a message may occupy on a GPU, alike for all links, such that messages
    on all links of any process leave the rest to its other work."""
    links: dict[int, int] = {}
    for pair in pairs:
        for process in pair:
            links[process] = links.get(process, 0) + 1
    return max(1, min(LINK_CTAS, MESSAGE_CTAS // max(links.values(), default=1)))
