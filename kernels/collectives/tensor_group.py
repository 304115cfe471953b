"""The collectives of tensor parallelism, over processes or over threads of one process.

Every member of a group calls the same operations in the same order with tensors that fit one
another. All members get the same bits, so parameters that each of them updates stay equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

THREAD_TIMEOUT_S = 60.0
"""How long a thread waits for the others before it gives up, in seconds."""


class TensorGroup:
    """Collectives of a process group; gloo or NCCL.

    Args:
        group: default: all processes.

    Attributes:
        rank, size: this process's place in the group, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.use(group)

    def use(self, group: dist.ProcessGroup | None) -> None:
        """From now on operations are of another group, of the same processes."""
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; ``tensor`` is contiguous and is returned."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum over the group, in place; ``tensor`` is contiguous."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if tensor.numel():  # as many elements on all members: all skip, or none
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """What all members have, one after another along ``dim``.

        Args:
            tensor: this member's part; along all other dims as large as everybody's.
            sizes: per member, how large its part is along ``dim``.
            dim: may be negative.

        Returns:
            A new contiguous tensor, ``sum(sizes)`` long along ``dim``.

        Raises:
            ValueError: if ``sizes`` does not fit the group or the tensor.
        """
        _check_sizes(self, tensor, sizes, dim)
        longest = max(sizes)
        # Parts of one length: not every backend gathers different ones.
        part = tensor.movedim(dim, 0)
        if part.shape[0] < longest:
            part = torch.cat([part, part.new_zeros(longest - part.shape[0], *part.shape[1:])])
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in sizes]
        if part.numel():
            self._all_gather(parts, part)
        whole = torch.cat([each[:size] for each, size in zip(parts, sizes, strict=True)])
        return whole.movedim(0, dim).contiguous()

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        dist.all_gather(parts, part, group=self.group)


class LoneMember(TensorGroup):
    """The first member of a group whose others are not there. What comes from them is as large as
    it would be, and has no meaning: it is for measuring memory.

    Args:
        size: how many members the group would have.
    """

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        return tensor

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        for each in parts:
            each.copy_(part)


class _Meeting:
    """Where the threads of a group put what they have and wait for one another."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.arrived: list[tuple[str, torch.Tensor] | None] = [None] * size


class ThreadGroup(TensorGroup):
    """A member of a group of threads of this process; see :func:`thread_groups`.

    Autograd runs the backward of CPU tensors in the thread that asks for it, so a thread may
    call ``backward`` on a graph with collectives in it.

    Raises (every collective):
        threading.BrokenBarrierError: if another thread gave up or does not come in time.
        ValueError: if the members call different operations, or with different shapes.

    Args:
        rank: of this member.
        size: how many members there are.
        meeting: where the members meet.
    """

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def abort(self) -> None:
        """Wake the other threads, which then raise: this one will not come again."""
        self._meeting.barrier.abort()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._combine("sum", tensor, lambda a, b: a + b)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._combine("max", tensor, torch.maximum)

    def _combine(
        self, name: str, tensor: torch.Tensor, add: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        def combine(parts: list[torch.Tensor]) -> torch.Tensor:
            if any(part.shape != tensor.shape for part in parts):
                shapes = [tuple(part.shape) for part in parts]
                raise ValueError(f"members reduce tensors of different shapes: {shapes}")
            result = parts[0].clone()
            for part in parts[1:]:
                result = add(result, part)
            return result

        with torch.no_grad():
            return tensor.copy_(self._meet(name, tensor.detach(), combine))

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        _check_sizes(self, tensor, sizes, dim)
        return self._meet("gather", tensor.detach(), lambda parts: torch.cat(parts, dim))

    def _meet(
        self,
        name: str,
        tensor: torch.Tensor,
        combine: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> torch.Tensor:
        meeting = self._meeting
        meeting.arrived[self.rank] = (name, tensor)
        meeting.barrier.wait()
        arrived = [part for part in meeting.arrived if part is not None]  # all have come by now
        names = [name for name, _ in arrived]
        if len(set(names)) > 1:
            raise ValueError(f"members call different operations: {', '.join(names)}")
        result = combine([tensor for _, tensor in arrived])
        meeting.barrier.wait()  # nobody changes what others still read
        return result


def thread_groups(size: int, timeout: float = THREAD_TIMEOUT_S) -> list[ThreadGroup]:
    """The members of a group of ``size`` threads, one for each.

    Args:
        timeout: how long one waits for the others, in seconds.
    """
    meeting = _Meeting(size, timeout)
    return [ThreadGroup(rank, size, meeting) for rank in range(size)]


def _check_sizes(
    group: TensorGroup, tensor: torch.Tensor, sizes: Sequence[int], dim: int
) -> None:
    if len(sizes) != group.size or sizes[group.rank] != tensor.shape[dim]:
        raise ValueError(
            f"sizes are {tuple(sizes)}; expected one for each of {group.size} members, and "
            f"{tensor.shape[dim]} for member {group.rank}"
        )
