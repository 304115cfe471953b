"""Batches of messages between the GPUs of a multiplexed program."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Messages:
    """Sends and receives within a process group.

    Args:
        group: of all GPUs' processes; used for nothing else, so that messages keep their order.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._under_way: list[tuple[dist.Work, torch.Tensor]] = []
        self.sent_bytes = 0

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> list[list[dist.Work]]:
        """Start a batch; returns at once.

        Args:
            sends: (to, tensor); tensors are kept until :meth:`wait_sent`.
            receives: (from, contiguous tensor to write).

        Returns:
            For each receive what to wait for.
        """
        sends = [(peer, tensor.detach().contiguous()) for peer, tensor in sends]
        operations = [
            dist.P2POp(kind, tensor, group=self._group, group_peer=peer)
            for kind, some in ((dist.isend, sends), (dist.irecv, receives))
            for peer, tensor in some
            if tensor.numel()
        ]
        if not operations:
            return [[] for _ in receives]
        works = dist.batch_isend_irecv(operations)
        self.sent_bytes += sum(tensor.nbytes for _, tensor in sends)
        if len(works) != len(operations):  # NCCL: one for the batch
            self._under_way += [(works[0], tensor) for _, tensor in sends]
            return [list(works) for _ in receives]
        tensors = [one.tensor for one in operations]
        count = sum(bool(tensor.numel()) for _, tensor in sends)
        self._under_way += zip(works[:count], tensors[:count], strict=True)
        left = iter(works[count:])
        return [[next(left)] if tensor.numel() else [] for _, tensor in receives]

    def wait_sent(self) -> None:
        """Until everything has been sent."""
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()
