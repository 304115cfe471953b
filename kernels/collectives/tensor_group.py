"""Collectives for tensor parallelism, over processes or over threads of one process.

Every member of a group must call the same operations in the same order with tensors that fit one
another. All members receive the same bits, so parameters that each of them updates stay equal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

THREAD_TIMEOUT_S = 60.0
"""Longest wait of a thread for the others, in seconds."""


class TensorGroup:
    """Collectives of a process group; gloo or NCCL.

    Args:
        group: default: all processes.

    Attributes:
        rank, size: this process's rank in the group, and the number of members.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.use(group)

    def use(self, group: dist.ProcessGroup | None) -> None:
        """Switch to another group of the same processes."""
        self.group = group if group is not None else dist.group.WORLD
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a contiguous tensor over the group, in place, and return it."""
        return self._all_reduce(tensor, dist.ReduceOp.SUM)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Take the elementwise maximum of a contiguous tensor over the group, in place."""
        return self._all_reduce(tensor, dist.ReduceOp.MAX)

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        if tensor.numel():  # the same size on all members, so all skip the call or none does
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, sizes: Sequence[int], dim: int) -> torch.Tensor:
        """Concatenate the tensors of all members along ``dim``.

        Args:
            tensor: this member's part; its other dimensions are equal on all members.
            sizes: length of each member's part along ``dim``.
            dim: may be negative.

        Returns:
            A new contiguous tensor of length ``sum(sizes)`` along ``dim``.

        Raises:
            ValueError: ``sizes`` does not fit the group or the tensor.
        """
        _check_sizes(self, tensor, sizes, dim)
        longest = max(sizes)
        # Pad to equal lengths: not every backend gathers different ones.
        padded = tensor.movedim(dim, 0)
        if padded.shape[0] < longest:
            padded = torch.cat([
                padded, padded.new_zeros(longest - padded.shape[0], *padded.shape[1:])
            ])
        padded = padded.contiguous()
        gathered = [torch.empty_like(padded) for _ in sizes]
        if padded.numel():
            self._all_gather(gathered, padded)
        joined = torch.cat([each[:size] for each, size in zip(gathered, sizes, strict=True)])
        return joined.movedim(0, dim).contiguous()

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        dist.all_gather(parts, part, group=self.group)


class LoneMember(TensorGroup):
    """First member of a group without other members, for measuring memory. Tensors from the other
    members have the right size and meaningless values."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size

    def _all_reduce(self, tensor: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        return tensor

    def _all_gather(self, parts: list[torch.Tensor], part: torch.Tensor) -> None:
        for each in parts:
            each.copy_(part)


class _Meeting:
    """Barrier at which the threads of a group exchange tensors."""

    def __init__(self, size: int, timeout: float) -> None:
        self.barrier = threading.Barrier(size, timeout=timeout)
        self.arrived: list[tuple[str, torch.Tensor] | None] = [None] * size


class ThreadGroup(TensorGroup):
    """A member of a group of threads of this process; see :func:`thread_groups`.

    Autograd runs the backward of CPU tensors in the calling thread, so a thread may call
    ``backward`` on a graph that contains collectives.

    Raises (every collective):
        threading.BrokenBarrierError: another thread aborted or did not arrive in time.
        ValueError: the members call different operations, or use different shapes.
    """

    def __init__(self, rank: int, size: int, meeting: _Meeting) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def abort(self) -> None:
        """Make the other threads raise, because this thread will not reach the barrier again."""
        self._meeting.barrier.abort()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._combine("sum", tensor, lambda a, b: a + b)

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._combine("max", tensor, torch.maximum)

    def _combine(
        self, name: str, tensor: torch.Tensor, add: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        def combine(parts: list[torch.Tensor]) -> torch.Tensor:
            if any(operand.shape != tensor.shape for operand in parts):
                shapes = [tuple(operand.shape) for operand in parts]
                raise ValueError(f"members reduce tensors of different shapes: {shapes}")
            result = parts[0].clone()
            for operand in parts[1:]:
                result = add(result, operand)
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
        arrived = [entry for entry in meeting.arrived if entry is not None]
        names = [name for name, _ in arrived]
        if len(set(names)) > 1:
            raise ValueError(f"members call different operations: {', '.join(names)}")
        result = combine([tensor for _, tensor in arrived])
        meeting.barrier.wait()  # no thread may change a tensor that another still reads
        return result


def thread_groups(size: int, timeout: float = THREAD_TIMEOUT_S) -> list[ThreadGroup]:
    """Return one member for each thread of a group of ``size`` threads.

    Args:
        timeout: longest wait for the other threads, in seconds.
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
