"""Gradient sums over the holders of shared parameters, in flight while backward runs.

Replicas of a module (data parallelism), processes that split samples' tokens, and tied embeddings
each hold a part of a parameter's gradient. Parameters that the same processes hold for the same
stages form a family, which has its own process group. The step's program defines when the sums of a
family start (:mod:`raymm.scheduler.program.issue_order`). From then on a bucket is reduced as soon
as the step's last backward has computed its gradients. All buckets of a process are reduced in one
order, because a sum may block operations that are issued after it. The gradients of a bucket's
parameters become views of the bucket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from raymm.kernels.collectives.waiting import wait
from raymm.kernels.host_copies import to_device
from raymm.scheduler.plan.stage import StageId

# Bucket size in bytes for summing gradients and for sending updated parameters.
BUCKET_BYTES = 64 * 2**20


class ParameterReference(NamedTuple):
    """Location of a parameter: process number, stage, and name in the stage."""

    process: int
    stage: StageId
    name: str


class ReductionGroup(NamedTuple):
    """Processes that hold parameters together, ascending, and the first replica of their stages."""

    processes: tuple[int, ...]
    stages: tuple[StageId, ...]


@dataclass(frozen=True)
class SharedParameter:
    """Parameter, or shard of one, whose gradient is summed over its holders (``references``).

    Attributes:
        owner: process that keeps the optimizer state and updates the parameter for all holders
            (ZeRO-1); None if every holder updates it.
    """

    references: tuple[ParameterReference, ...]
    owner: int | None = None

    @property
    def reduction_group(self) -> ReductionGroup:
        return ReductionGroup(
            tuple(sorted({reference.process for reference in self.references})),
            tuple(sorted({reference.stage.first_replica for reference in self.references})),
        )


class _Member(NamedTuple):
    """Shared parameter and this process's holders of it. The first holder acts for all."""

    shared: SharedParameter
    stages: tuple[StageId, ...]
    parameters: tuple[nn.Parameter, ...]


@dataclass
class _Bucket:
    """Parameters of one dtype and one owner that are reduced together.

    Attributes:
        ready: ids of first holders whose gradient is final.
        flat: gradients, followed by the number of processes that have one per member, while in
            flight.
    """

    members: list[_Member]
    ready: set[int] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None
    present: list[bool] = field(default_factory=list)

    @property
    def owner(self) -> int | None:
        return self.members[0].shared.owner

    @property
    def started(self) -> bool:
        return self.flat is not None

    def start(self, group: dist.ProcessGroup | None) -> None:
        firsts = [_gathered(member) for member in self.members]
        self.present = [p.grad is not None for p in firsts]
        gradients = [
            (torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in firsts
        ]
        counts = torch.tensor(self.present, dtype=gradients[0].dtype, device="cpu")
        self.flat = torch.cat([*gradients, to_device(counts, gradients[0].device)])
        for parameter in firsts:
            parameter.grad = None
        if group is not None and self.owner is None:
            self.work = dist.all_reduce(self.flat, group=group, async_op=True)
        elif group is not None:
            self.work = dist.reduce(self.flat, self.owner, group=group, async_op=True)

    def finish(self, process: int, alone: bool) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Wait for the sum and distribute it to the holders. A missing gradient counts as zero. If
        this process is ``alone``, a parameter stays without a gradient, so that AdamW skips it.

        Yields:
            Parameters whose gradient is zero because this process has none, each with a device
            scalar that is 1 if no process has one, else 0.
        """
        if self.work is not None:
            wait(self.work)
        if self.owner in (None, process):
            assert self.flat is not None  # see start
            firsts = [member.parameters[0] for member in self.members]
            *gradients, counts = self.flat.split([*(p.numel() for p in firsts), len(firsts)])
            for number, (member, gradient) in enumerate(zip(self.members, gradients, strict=True)):
                present = self.present[number]
                if alone and not present:
                    continue
                first, *other_holders = member.parameters
                first.grad = gradient.view(first.shape)
                for reference in other_holders:
                    reference.grad = first.grad.clone()
                if not present:
                    absent = (counts[number] == 0).float()
                    for parameter in member.parameters:
                        yield parameter, absent
        self.drop()

    def drop(self) -> None:
        self.flat = self.work = None
        self.ready.clear()


def _gathered(member: _Member) -> nn.Parameter:
    """Return the first holder, with the sum of the gradients of all holders on this process."""
    first, *other_holders = member.parameters
    for reference in other_holders:
        if reference.grad is not None:
            first.grad = reference.grad if first.grad is None else first.grad + reference.grad
            reference.grad = None
    return first


@dataclass
class _ReductionGroupState:
    """Buckets of a family; ``unfinished`` are stages here whose backward of this step has not
    finished."""

    of: ReductionGroup
    group: dist.ProcessGroup | None
    buckets: list[_Bucket]
    stages: frozenset[StageId]
    unfinished: set[StageId] = field(default_factory=set)

    def is_final(self, bucket: _Bucket) -> bool:
        """Return True if this process adds no more to a bucket's gradients in this step."""
        return not self.unfinished or len(bucket.ready) == len(bucket.members)

    def renew(self, group: dist.ProcessGroup | None) -> None:
        """Drop sums in flight, and use another group of the same processes from now on."""
        self.group = group
        self.unfinished.clear()
        for bucket in self.buckets:
            bucket.drop()

    def expect(self, stages: frozenset[StageId]) -> None:
        """Start a step in which ``stages`` have a backward."""
        self.unfinished = set(self.stages & stages)

    @property
    def started(self) -> int:
        return sum(bucket.started for bucket in self.buckets)


class GradientReduction:
    """Gradient sums that one process takes part in.

    Args:
        shared: shared parameters with a holder here, in an order common to all processes.
        limit: bytes per bucket; only a single larger parameter exceeds it.

    Attributes:
        perhaps_absent: after :meth:`wait`, parameters whose gradient is zero because this process
            has none, each with a device scalar that is 1 if no process has one, else 0.
    """

    def __init__(
        self,
        process: int,
        parameters: Mapping[tuple[StageId, str], nn.Parameter],
        shared: Sequence[SharedParameter],
        groups: Mapping[ReductionGroup, dist.ProcessGroup],
        limit: int = BUCKET_BYTES,
    ) -> None:
        self._process = process
        members: dict[ReductionGroup, list[_Member]] = {}
        for parameter in shared:
            holders = [h for h in parameter.references if (h.stage, h.name) in parameters
                       and h.process == process]  # fmt: skip
            if holders:
                members.setdefault(parameter.reduction_group, []).append(
                    _Member(
                        parameter, tuple(h.stage for h in holders),
                        tuple(parameters[h.stage, h.name] for h in holders),
                    )
                )
        self._reduction_groups = [
            _ReductionGroupState(
                reduction_group,
                groups.get(reduction_group),
                # Backward computes the gradients of the last layer first.
                buckets_of(list(reversed(group_members)), limit),
                frozenset(stage for member in group_members for stage in member.stages),
            )
            for reduction_group, group_members in members.items()
        ]
        self._armed: StageId | None = None
        positions = {id(parameter): position for position, parameter in enumerate(shared)}
        # A bucket is ordered by its first layer's parameter, whose gradient is computed last.
        self._places = {
            id(bucket): min(positions[id(member.shared)] for member in bucket.members)
            for reduction_group in self._reduction_groups for bucket in reduction_group.buckets
        }
        # Buckets whose sums may start, in the order in which they must start.
        self._begun: deque[tuple[_ReductionGroupState, _Bucket]] = deque()
        self._sums = False  # True if this step sums gradients
        self.perhaps_absent: list[tuple[nn.Parameter, torch.Tensor]] = []
        for reduction_group in self._reduction_groups:
            for bucket in reduction_group.buckets:
                for member in bucket.members:
                    if len(member.parameters) == 1:
                        member.parameters[0].register_post_accumulate_grad_hook(
                            self._hook(reduction_group, bucket, member.stages[0])
                        )

    def renew(self, groups: Mapping[ReductionGroup, dist.ProcessGroup]) -> None:
        """Drop sums in flight, and use other groups of the same processes from now on."""
        self._armed, self._sums = None, False
        self._begun.clear()
        self.perhaps_absent.clear()
        for state in self._reduction_groups:
            state.renew(groups.get(state.of))

    def _hook(self, reduction_group: _ReductionGroupState, bucket: _Bucket, stage: StageId):
        def accumulated(parameter: nn.Parameter) -> None:
            if self._armed == stage and reduction_group.unfinished == {stage}:
                bucket.ready.add(id(parameter))
                self._start_final()

        return accumulated

    def expect(self, stages: Iterable[StageId]) -> None:
        """Start a step that ends in :meth:`wait`; ``stages`` have a backward in it."""
        due = frozenset(stages)
        self._begun.clear()
        self._sums = True
        for reduction_group in self._reduction_groups:
            reduction_group.expect(due)

    def begin(self, stages: tuple[StageId, ...]) -> None:
        """Allow the sums of a family to start as soon as its gradients are final. Does nothing in a
        step that does not end in :meth:`wait`."""
        if not self._sums:
            return
        buckets = [
            (reduction_group, bucket)
            for reduction_group in self._reduction_groups if reduction_group.of.stages == stages
            for bucket in reduction_group.buckets
        ]
        self._begun += sorted(buckets, key=lambda begun: -self._places[id(begun[1])])
        self._start_final()

    def _start_final(self) -> None:
        while self._begun and self._begun[0][0].is_final(self._begun[0][1]):
            reduction_group, bucket = self._begun.popleft()
            bucket.start(reduction_group.group)

    def last_backward(self, stage: StageId) -> None:
        """Announce the stage's last backward of the step, which visits every parameter once."""
        self._armed = stage

    def finished(self, stage: StageId) -> None:
        """Announce that the stage's gradients are final, and start the sums that are ready."""
        self._armed = None
        for reduction_group in self._reduction_groups:
            reduction_group.unfinished.discard(stage)
        self._start_final()

    def wait(self) -> None:
        """Give every holder of a shared parameter, or only its owner if it has one, the sum of all
        holders' gradients. Collective. On a GPU, work issued next waits for the sums."""
        self._sums = False
        self.perhaps_absent.clear()
        for reduction_group in self._reduction_groups:
            reduction_group.unfinished.clear()
        self._start_final()
        for reduction_group in self._reduction_groups:
            for bucket in reduction_group.buckets:
                if not bucket.started:
                    bucket.start(reduction_group.group)
        for reduction_group in self._reduction_groups:
            for bucket in reduction_group.buckets:
                alone = reduction_group.group is None
                self.perhaps_absent += bucket.finish(self._process, alone)

    def send_updates(self) -> None:
        """Broadcast updated values from each parameter's owner to all holders. Collective."""
        under_way = []
        with torch.no_grad():
            for reduction_group in self._reduction_groups:
                for bucket in reduction_group.buckets:
                    if bucket.owner is None or reduction_group.group is None:
                        continue
                    values = [member.parameters[0].detach() for member in bucket.members]
                    flat = torch.cat([value.reshape(-1) for value in values])
                    work = dist.broadcast(
                        flat, bucket.owner, group=reduction_group.group, async_op=True
                    )
                    under_way.append((bucket, flat, work))
            for bucket, flat, work in under_way:
                wait(work)
                firsts = [member.parameters[0] for member in bucket.members]
                for member, flat_value in zip(
                    bucket.members, flat.split([p.numel() for p in firsts]), strict=True
                ):
                    for parameter in member.parameters:
                        parameter.copy_(flat_value.view(parameter.shape))


def buckets_of(members: Sequence[_Member], limit: int) -> list[_Bucket]:
    """Assign members to buckets of one dtype and owner, of at most ``limit`` bytes if possible.
    Owners alternate between parameters, so one bucket per owner is filled at a time."""
    buckets: list[_Bucket] = []
    filling: dict[tuple[torch.dtype, int | None], tuple[_Bucket, int]] = {}
    for member in members:
        first = member.parameters[0]
        kind = first.dtype, member.shared.owner
        bucket, size = filling.get(kind, (None, 0))
        if bucket is None or size + first.nbytes > limit:
            bucket, size = _Bucket([]), 0
            buckets.append(bucket)
        bucket.members.append(member)
        filling[kind] = bucket, size + first.nbytes
    return buckets


@dataclass(frozen=True)
class ParameterOwnership:
    """Duties of a process for parameters that other processes hold, too.

    Attributes:
        shared: parameters whose gradients are summed, in an order common to all processes.
        in_grad_norm: parameters that this process, among all processes with identical copies,
            counts in the gradient norm, and whose optimizer state it writes.
    """

    shared: tuple[SharedParameter, ...] = ()
    in_grad_norm: frozenset[tuple[StageId, str]] = frozenset()
    saves: frozenset[tuple[StageId, str]] = frozenset()
