"""Communicators of a process. All of them are created before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from raymm.actors.executor.channels import Link, RecvChannel, SendChannel
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.actors.optimizer.gradient_reduction import ReductionGroup
from raymm.actors.rank.rank_spec import RankSpec
from raymm.actors.rank.rendezvous import Rendezvous
from raymm.kernels.collectives.p2p import Exchange
from raymm.kernels.collectives.tensor_group import TensorGroup
from raymm.kernels.collectives.waiting import PointToPoint
from raymm.scheduler.graph.module_graph import Direction
from raymm.scheduler.plan.process_grid import P2PGroup
from raymm.scheduler.plan.stage import Edge

Within = TypeVar("Within", Exchange, TensorGroup)


class Connecting(NamedTuple):
    """Pseudo-instruction that is reported while a process creates a group."""

    members: Sequence[int]
    op: str = "connecting"

    def __str__(self) -> str:
        return f"connecting processes {', '.join(map(str, self.members))}"


class Connections:
    """Process groups and channels of a process.

    Groups are created in the order of their numbers, each fully connected before the next;
    :mod:`raymm.scheduler.plan.rendezvous_order` explains why this cannot deadlock.

    Args:
        task_tracker: records the group that is being connected, for failure diagnosis.

    Attributes:
        data, samples, tokens, tensors: groups of processes of this rank that work on the same
            microbatch, split its samples, split the samples' tokens, or split each token's
            computation. None if this process is the only member.

    Raises:
        ChannelError: the members of a group did not connect within the timeout; names them.
    """

    def __init__(self, spec: RankSpec, place: Rendezvous, task_tracker: TaskTracker) -> None:
        self._spec = spec
        self.data: Exchange | None = None
        self.samples: Exchange | None = None
        self.tokens: Exchange | None = None
        self.tensors: TensorGroup | None = None
        self.renew(place, task_tracker)

    def renew(self, place: Rendezvous, task_tracker: TaskTracker) -> None:
        """Create all groups and channels again; no operation may be in flight. Channels are new
        objects. The groups that stages hold are kept as objects and switched to the new process
        groups."""
        spec, self._place = self._spec, place
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._links: dict[tuple[int, ...], tuple[PointToPoint, PointToPoint]] = {}
        self.reductions: dict[ReductionGroup, dist.ProcessGroup] = {}
        plan, groups = spec.connections, spec.process_groups
        for meeting in plan.rounds:
            number, members = meeting.number, meeting.members
            task_tracker.enter(Connecting(members))
            if meeting.is_link:
                self._links[members] = place.new_link(number, *members, ctas=plan.link_ctas)
            elif meeting.sums is not None:
                self.reductions[meeting.sums] = place.new_group(number, members)
            else:
                self._groups[members] = group = place.new_group(number, members)
                if members == groups.data:
                    self._hosts = place.new_host_group(number, members, group)
        self.data = self._within(groups.data, Exchange, self.data)
        self.samples = self._within(groups.samples, Exchange, self.samples)
        self.tokens = self._within(groups.tokens, Exchange, self.tokens)
        self.tensors = self._within(groups.tensors, TensorGroup, self.tensors)
        self.senders: dict[Edge, SendChannel] = {}
        self.receivers: dict[Edge, RecvChannel] = {}
        # Gradient channels come last: they use the layouts that the output channels record.
        backward = Direction.BACKWARD
        for edge, number, p2p_group in sorted(
            plan.p2p_groups, key=lambda opened: opened[2].direction is backward
        ):
            self._open_p2p_group(edge, number, p2p_group)

    def largest_on_host(self, values: torch.Tensor) -> torch.Tensor:
        """All-reduce ``values`` in place to their maximum over the processes of ``data``, on the
        host."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._hosts)
        return values

    def _within(
        self, members: tuple[int, ...], kind: type[Within], before: Within | None
    ) -> Within | None:
        if not members:
            return None
        group = self._groups[members]
        if before is None:
            return kind(group)
        before.use(group)
        return before

    def _open_p2p_group(self, edge: Edge, number: int, p2p_group: P2PGroup) -> None:
        me, device, resharding = self._spec.rank, self._place.device, p2p_group.resharding
        links: dict[int, Link] = {}
        for sender, receiver in resharding.links():
            ends = p2p_group.senders[sender], p2p_group.receivers[receiver]
            if me in ends:
                group, host_group = self._links[ends]
                index, peer = (receiver, ends[1]) if me == ends[0] else (sender, ends[0])
                links[index] = Link(group, peer, number, host_group)
        gradient = p2p_group.direction is Direction.BACKWARD
        if me in p2p_group.senders:
            # A gradient for another module is a partial sum on every process that works on the
            # microbatch.
            between = edge[0].module != edge[1].module
            summed = self.data.group if gradient and between and self.data else None
            self.senders[edge] = SendChannel(
                links, device, resharding, p2p_group.senders.index(me), summed, gradient
            )
        else:
            self.receivers[edge] = RecvChannel(
                links, device, self._place.timeouts.wait, resharding,
                self._groups.get(p2p_group.receivers),
                in_order=device.type == "cuda",
                outputs=self.senders[edge[1], edge[0]] if gradient else None,
            )
