"""What trains in a process, copied to host memory: enough to go on after a failure, by this process
or by another one in its place.

A checkpoint is for other layouts, too, and has of every tensor one copy; a snapshot has all that
changes in one process, whoever else has the same, and is read by a process with the same number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raymm.actors.optimizer.host_staging import HostStaging
from raymm.actors.optimizer.optimizer import RankOptimizer
from raymm.actors.optimizer.progress import Progress
from raymm.actors.sharding.fully_sharded import local_part
from raymm.scheduler.plan.stage import StageId

logger = logging.getLogger(__name__)

Stages = Mapping[StageId, nn.Module]


class PackedTensor(NamedTuple):
    """A tensor as Ray moves it without a copy of its own: its bytes, NumPy lacks some dtypes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Snapshot(NamedTuple):
    """What trains in a process.

    Attributes:
        progress: steps that it has taken.
        trained: trainable parameters, and buffers of what has some, by stage and name.
        optimizer: the optimizer's state, by stage, name and key.
    """

    progress: Progress
    trained: dict[tuple[StageId, str], Any]
    optimizer: dict[tuple[StageId, str, str], Any]


def copy_of(
    stages: Stages, optimizer: RankOptimizer, staging: HostStaging
) -> Callable[[], Snapshot]:
    """Begin to copy what trains now to host memory. It may change once ``staging`` has waited.

    Args:
        stages: the process's.
        optimizer: of their parameters.
        staging: copies the tensors.

    Returns:
        A function that waits for the copy and returns it.
    """
    trained = {
        # A forward changes buffers, so the device copies them at once.
        place: tensor if is_parameter else tensor.clone()
        for place, tensor, is_parameter in _trained(stages)
    }
    state, progress = optimizer.state_tensors(), optimizer.progress
    places, state_places = list(trained), list(state)
    tensors = [*trained.values(), *state.values()]
    copied = staging.copy(tensors, temporary=optimizer.state_is_temporary)

    def result() -> Snapshot:
        copies = iter(copied.result())
        return Snapshot(
            progress,
            {place: next(copies) for place in places},
            {place: next(copies) for place in state_places},
        )

    return result


def restore(snapshot: Snapshot, stages: Stages, optimizer: RankOptimizer) -> None:
    """Put back what :func:`copy_of` copied.

    Args:
        snapshot: its tensors, or these as :func:`packed` has them.
        stages, optimizer: as of :func:`copy_of`.
    """
    with torch.no_grad():
        for place, tensor, _ in _trained(stages):
            tensor.copy_(_unpacked(snapshot.trained[place]))
    state = {place: _unpacked(value) for place, value in snapshot.optimizer.items()}
    optimizer.forget_state()
    optimizer.load_state_tensors(state, *snapshot.progress)


def packed(snapshot: Snapshot) -> Snapshot:
    """The same to be handed to Ray."""
    return Snapshot(
        snapshot.progress,
        {place: _packed(tensor) for place, tensor in snapshot.trained.items()},
        {place: _packed(tensor) for place, tensor in snapshot.optimizer.items()},
    )


def _trained(stages: Stages) -> Iterator[tuple[tuple[StageId, str], torch.Tensor, bool]]:
    """Yield the place and the local part of what trains, and True for parameters."""
    for stage, module in stages.items():
        for part in module.modules():
            if isinstance(part, FSDPModule):  # a step that failed may have left it gathered
                part.reshard()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            continue
        for name, tensor in module.state_dict(keep_vars=True).items():
            # Running statistics of what is trained change, though nothing has their gradient.
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                yield (stage, name), local_part(tensor.detach()), tensor.requires_grad


def _packed(tensor: torch.Tensor) -> PackedTensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return PackedTensor(str(tensor.dtype), tuple(tensor.shape), flat)


def _unpacked(value: torch.Tensor | PackedTensor) -> torch.Tensor:
    """A tensor of its own memory: pages of the object store cannot be written."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    dtype = getattr(torch, value.dtype.removeprefix("torch."))
    return torch.from_numpy(value.data.copy()).view(dtype).view(value.shape)


class SnapshotActor:
    """Part of actors that have something that trains."""

    _stages: Mapping[StageId, Any]
    _optimizer: RankOptimizer
    _staging: HostStaging
    _failed = False  # a step has, since the processes met

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copies: SimpleQueue[Callable[[], Snapshot] | None] = SimpleQueue()
        self._of_others: dict[tuple[int, int], Snapshot] = {}

    def copy_snapshot(self) -> None:
        """Begin to copy what trains, for :meth:`hand_over_snapshot`; nothing after a step that
        failed."""
        copied = None
        try:
            if not self._failed:
                copied = copy_of(self._stages, self._optimizer, self._staging)
        finally:  # where there is no memory for one: who hands it over waits for it
            self._copies.put(copied)

    def hand_over_snapshot(self) -> tuple[int | None, Snapshot | None]:
        """What the next :meth:`copy_snapshot` copies, in a thread of its own; and how many steps
        this process had taken then. None where a step has failed, or the copy."""
        if (result := self._copies.get()) is None:
            return None, None
        try:
            copied = result()
        except (MemoryError, RuntimeError):
            logger.warning("no snapshot was taken: it could not be copied", exc_info=True)
            return None, None
        return copied.progress.steps, packed(copied)

    def keep_snapshot(self, rank: int, step: int, part: Sequence[Any], newest: int) -> int:
        """Keep what a process of another node hands over, in the object store of this one, for as
        long as this process holds it; in a thread of its own.

        Args:
            rank: that process's number.
            step: of the snapshot.
            part: Ray's reference to it, alone: what is waited for holds up no other call.
            newest: older ones nobody asks for any more.

        Returns:
            The step.
        """
        import ray

        for old in [kept for kept in self._of_others if kept[1] < newest]:
            del self._of_others[old]
        # Its tensors are views of the object store.
        self._of_others[rank, step] = ray.get(part[0])
        return step

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Go on from what this process, or the one in whose place it is, had then."""
        self._staging.wait()
        restore(snapshot, self._stages, self._optimizer)
