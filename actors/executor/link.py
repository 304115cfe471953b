"""Connection of an edge to one process at its other end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist

from raymm.kernels.collectives.waiting import PointToPoint, receive_from, send_to


class Link:
    """Connection to one process at the other end of an edge.

    Args:
        group: group of the two processes, shared by all edges with messages in the same direction.
        tag: number of the edge. NCCL has no tags: messages of all edges that share a group are
            received in the order in which they were sent.
        host_group: group for descriptions and side tensors in host memory; ``group`` by default.

    Attributes:
        isend, irecv: start sending a contiguous tensor, or receiving into one.
        isend_to_host, irecv_on_host: the same for tensors in host memory.
        isend_aside, irecv_aside: the same for host memory, independent of the order of other
            messages.
    """

    def __init__(
        self, group: PointToPoint, peer: int, tag: int = 0,
        host_group: PointToPoint | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        host_group = host_group or group
        self.isend, self.irecv = _operations(group, 2 * tag)
        self.isend_to_host, self.irecv_on_host = _operations(host_group, 2 * tag)
        self.isend_aside, self.irecv_aside = _operations(host_group, 2 * tag + 1)


Operation = Callable[[torch.Tensor], dist.Work]


def _operations(group: PointToPoint, tag: int) -> tuple[Operation, Operation]:
    number = 1 - group.rank()
    return partial(send_to, group, number, tag), partial(receive_from, group, number, tag)


def name_ranks(links: Mapping[int, Link]) -> str:
    peers = sorted(link.peer for link in links.values())
    return f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {peers}"
