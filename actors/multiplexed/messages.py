"""Batches of messages between the GPUs of a multiplexed program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from raymm.kernels.collectives.waiting import Waitable, started, wait

# Tensors for the same GPU travel as one message if together they have at most so many bytes:
# below, a message costs more than copying.
PACKED_BYTES = 2**20


class Messages:
    """Sends and receives within a process group.

    Args:
        group: of all GPUs' processes; used for nothing else, so that messages keep their order.
        host_group: of the same processes, for tensors in the hosts' memory; by default ``group``.

    Attributes:
        sent_bytes: since it was made.
    """

    def __init__(
        self, group: dist.ProcessGroup, host_group: dist.ProcessGroup | None = None
    ) -> None:
        self._group = group
        self._host_group = host_group or group
        self._under_way: list[tuple[Waitable, torch.Tensor]] = []
        self.sent_bytes = 0

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[list[Waitable]]:
        """Start a batch; returns at once. Of two GPUs, the one must send what the other receives,
        in the same order.

        Args:
            sends: (to, tensor); values are read before the return or kept until
                :meth:`wait_sent`.
            receives: (from, contiguous tensor to write).

        Returns:
            For each receive what to wait for.
        """
        outgoing = [
            (peer, _flat([sends[i][1].detach() for i in pack])) for peer, pack in _packs(sends)
        ]
        incoming = []
        for peer, pack in _packs(receives):
            targets = [receives[i][1] for i in pack]
            flat = targets[0] if len(pack) == 1 else targets[0].new_empty(
                sum(target.numel() for target in targets)
            )
            incoming.append((peer, pack, flat))
        operations = [
            dist.P2POp(dist.isend, flat, group=self._group, group_peer=peer)
            for peer, flat in outgoing
        ] + [
            dist.P2POp(dist.irecv, flat, group=self._group, group_peer=peer)
            for peer, _, flat in incoming
        ]
        waitables: list[list[Waitable]] = [[] for _ in receives]
        if not operations:
            return waitables
        works = dist.batch_isend_irecv(operations)
        if len(works) != len(operations):  # NCCL: one for the batch
            works = [works[0]] * len(operations)
        self.sent_bytes += sum(flat.nbytes for _, flat in outgoing)
        self._under_way += [
            (work, flat) for work, (_, flat) in zip(works, outgoing, strict=False)
        ]
        for work, (_, pack, flat) in zip(works[len(outgoing) :], incoming, strict=True):
            waits: Waitable = work
            if len(pack) > 1:
                waits = _Unpacks(work, flat, [receives[i][1] for i in pack])
            for i in pack:
                waitables[i].append(waits)
        return waitables

    def start_flags(
        self, sends: Mapping[int, Sequence[bool]], receives: Mapping[int, int]
    ) -> dict[int, Flags]:
        """Start to exchange flags, one message between two GPUs; returns at once. They go through
        the hosts' memory: to read them is to wait for another host, not for a device.

        Args:
            sends: flags by the GPU that gets them.
            receives: how many a GPU sends.

        Returns:
            Flags by the GPU that they come from.
        """
        for peer, flags in sends.items():
            data = torch.tensor(flags, dtype=torch.uint8)
            work = started(dist.isend(data, group=self._host_group, group_dst=peer))
            self._under_way.append((work, data))
        flags_of = {}
        for peer, count in receives.items():
            data = torch.empty(count, dtype=torch.uint8)
            work = started(dist.irecv(data, group=self._host_group, group_src=peer))
            flags_of[peer] = Flags(work, data)
        return flags_of

    def wait_sent(self) -> None:
        """Until everything has been sent."""
        for work, _ in self._under_way:
            wait(work)
        self._under_way.clear()


class Flags:
    """Flags that come from another GPU's host."""

    def __init__(self, work: Waitable, data: torch.Tensor) -> None:
        self._work, self._data = work, data
        self._read: list[bool] | None = None

    def read(self) -> list[bool]:
        """All of them; waits until they are there."""
        if self._read is None:
            wait(self._work)
            self._read = [bool(flag) for flag in self._data.tolist()]
        return self._read


class _Unpacks:
    """A message, and the tensors that it is written to."""

    def __init__(self, work: Waitable, flat: torch.Tensor, targets: list[torch.Tensor]) -> None:
        self._work: Waitable | None = work
        self._flat, self._targets = flat, targets

    def wait(self, timeout: timedelta | None = None, /) -> None:
        if self._work is None:
            return
        wait(self._work, timeout)
        parts = self._flat.split([target.numel() for target in self._targets])
        for target, part in zip(self._targets, parts, strict=True):
            target.copy_(part.view(target.shape))
        self._work = None


def _packs(tensors: Sequence[tuple[int, torch.Tensor]]) -> list[tuple[int, list[int]]]:
    """(peer, which tensors) of every message; tensors without elements do not travel."""
    by_kind: dict[tuple[int, torch.dtype], list[int]] = {}
    for i, (peer, tensor) in enumerate(tensors):
        if tensor.numel():
            by_kind.setdefault((peer, tensor.dtype), []).append(i)
    packs = []
    for (peer, _), indices in by_kind.items():
        if sum(tensors[i][1].nbytes for i in indices) <= PACKED_BYTES:
            packs.append((peer, indices))
        else:
            packs += [(peer, [i]) for i in indices]
    return packs


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    if len(tensors) == 1:
        return tensors[0].contiguous().view(-1)
    return torch.cat([tensor.reshape(-1) for tensor in tensors])
