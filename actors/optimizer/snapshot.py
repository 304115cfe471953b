"""Snapshots of a process's trained state in host memory, for resuming after a failure.

A checkpoint can be read in other layouts, and has one copy of every tensor. A snapshot has all
state of one process that changes, including state that other processes hold, too, and is read by a
process with the same number.
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
from raymm.actors.optimizer.optimizer import Progress, RankOptimizer
from raymm.actors.sharding.fully_sharded import local_part
from raymm.scheduler.plan.stage import StageId

logger = logging.getLogger(__name__)

Stages = Mapping[StageId, nn.Module]


class PackedTensor(NamedTuple):
    """Tensor as bytes, which Ray transfers without copying. NumPy lacks some dtypes."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


class Snapshot(NamedTuple):
    """Trained state of a process.

    Attributes:
        trained: trainable parameters, and buffers of modules with trainable parameters.
    """

    progress: Progress
    trained: dict[tuple[StageId, str], Any]
    optimizer: dict[tuple[StageId, str, str], Any]


def copy_of(
    stages: Stages, optimizer: RankOptimizer, staging: HostStaging
) -> Callable[[], Snapshot]:
    """Start copying the trained state to host memory; return a function that waits for the copy and
    returns it. The state may change once ``staging`` has waited."""
    trained = {
        # A forward may change buffers, so they are copied on the device at once.
        key: tensor if is_parameter else tensor.clone()
        for key, tensor, is_parameter in _trained(stages)
    }
    state, progress = optimizer.state_tensors(), optimizer.progress
    trained_keys, state_keys = list(trained), list(state)
    tensors = [*trained.values(), *state.values()]
    copied = staging.copy(tensors, temporary=optimizer.state_is_temporary)

    def result() -> Snapshot:
        copies = iter(copied.result())
        return Snapshot(
            progress,
            {key: next(copies) for key in trained_keys},
            {key: next(copies) for key in state_keys},
        )

    return result


def restore(snapshot: Snapshot, stages: Stages, optimizer: RankOptimizer) -> None:
    """Restore a copy made by :func:`copy_of`, packed or not."""
    with torch.no_grad():
        for key, tensor, _ in _trained(stages):
            tensor.copy_(_unpacked(snapshot.trained[key]))
    state = {key: _unpacked(value) for key, value in snapshot.optimizer.items()}
    optimizer.forget_state()
    optimizer.load_state_tensors(state, *snapshot.progress)


def packed(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose tensors are NumPy arrays, which Ray shares without a copy."""
    return Snapshot(
        snapshot.progress,
        {key: _packed(tensor) for key, tensor in snapshot.trained.items()},
        {key: _packed(tensor) for key, tensor in snapshot.optimizer.items()},
    )


def _trained(stages: Stages) -> Iterator[tuple[tuple[StageId, str], torch.Tensor, bool]]:
    """Yield (key, local tensor, True for a parameter) of the trained state."""
    for stage, module in stages.items():
        for child in module.modules():
            if isinstance(child, FSDPModule):  # a failed step may have left it gathered
                child.reshard()
        if not any(parameter.requires_grad for parameter in module.parameters()):
            continue
        for name, tensor in module.state_dict(keep_vars=True).items():
            # Running statistics of trained modules change without having gradients.
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
                yield (stage, name), local_part(tensor.detach()), tensor.requires_grad


def _packed(tensor: torch.Tensor) -> PackedTensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return PackedTensor(str(tensor.dtype), tuple(tensor.shape), flat)


def _unpacked(value: torch.Tensor | PackedTensor) -> torch.Tensor:
    """Return a tensor with its own memory, because the object store is read-only."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    dtype = getattr(torch, value.dtype.removeprefix("torch."))
    return torch.from_numpy(value.data.copy()).view(dtype).view(value.shape)


class SnapshotActor:
    """Base of actors that copy their trained state and keep the snapshots of others."""
    _stages: Mapping[StageId, Any]
    _optimizer: RankOptimizer
    _staging: HostStaging
    _failed = False  # True if a step has failed since the processes connected

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._copies: SimpleQueue[Callable[[], Snapshot] | None] = SimpleQueue()
        self._of_others: dict[tuple[int, int], Snapshot] = {}

    def copy_snapshot(self) -> None:
        """Start copying the trained state, for :meth:`hand_over_snapshot`. Copies nothing after a
        failed step."""
        copied = None
        try:
            if not self._failed:
                copied = copy_of(self._stages, self._optimizer, self._staging)
        finally:  # also without memory for a copy: the other thread waits for the result
            self._copies.put(copied)

    def hand_over_snapshot(self) -> tuple[int | None, Snapshot | None]:
        """Return the number of finished steps and the state that the next :meth:`copy_snapshot`
        copies; None for both after a failed step or a failed copy. Runs in a separate thread."""
        if (result := self._copies.get()) is None:
            return None, None
        try:
            copied = result()
        except (MemoryError, RuntimeError):
            logger.warning("no snapshot was taken: it could not be copied", exc_info=True)
            return None, None
        return copied.progress.steps, packed(copied)

    def keep_snapshot(self, rank: int, step: int, part: Sequence[Any], newest: int) -> int:
        """Store another process's part of a snapshot in this node's object store, as long as this
        process holds it, and drop those older than ``newest``. Return the step. Runs in a separate
        thread.

        Args:
            part: list with Ray's reference to the part, so that the wait for it delays no other
                call.
        """
        import ray

        for old in [key for key in self._of_others if key[1] < newest]:
            del self._of_others[old]
        # Its tensors are views of the object store.
        self._of_others[rank, step] = ray.get(part[0])
        return step

    def restore_snapshot(self, snapshot: Snapshot) -> None:
        """Resume from the state of this process, or of the process that it replaces, in a
        snapshot."""
        self._staging.wait()
        restore(snapshot, self._stages, self._optimizer)
