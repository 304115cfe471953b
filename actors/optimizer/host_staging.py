"""Copies of a process's tensors in host memory, made by the device while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from raymm.actors.optimizer.optimizer import Progress, RankOptimizer
from raymm.actors.sharding.fully_sharded import local_part
from raymm.scheduler.plan.stage import StageId

# Bytes of each half of the pinned memory: the largest chunk that is copied at a time.
CHUNK_BYTES = 256 * 2**20
# Offsets of tensors in a chunk are multiples of this number of bytes, for all dtypes.
ALIGNMENT = 64


class _Part(NamedTuple):
    """Range of bytes ``[start, stop)`` of a tensor, and its offset in a chunk."""

    tensor: int
    start: int
    stop: int
    offset: int


class HostStaging:
    """Copies tensors of a device to host memory.

    On a GPU the device copies chunks of at most :data:`CHUNK_BYTES` on its own stream into two
    halves of pinned memory. A thread copies each chunk to pageable memory while the next one
    arrives. Checkpoints and snapshots share the pinned memory, because pinning takes longer than
    copying, and torch's allocator rounds each pinned tensor up to a power of two. The training
    thread waits only in :meth:`wait`, before the tensors change. On a CPU tensors are copied at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._thread = ThreadPoolExecutor(1, "copy-to-host")
        # Event after which the device has read the tensors of each copy; None if the copy failed.
        self._reads: list[Future[Any]] = []

    @property
    def pinned_bytes(self) -> int:
        return self._pinned.nbytes

    def copy(
        self,
        tensors: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype] | None = None,
        temporary: bool = False,
    ) -> Future[list[torch.Tensor]]:
        """Copy tensors in the state that the current stream's work produces so far. They must not
        change until :meth:`wait` has returned. Raise a ``MemoryError`` if CUDA cannot pin the
        memory for a chunk.

        Args:
            tensors: on the device, with any strides.
            temporary: True if the tensors exist for this copy only. It is then complete on return,
                so that the tensors take no memory during a step.

        Returns:
            Contiguous copies with the shapes of ``tensors``, or an error if host memory was
            insufficient.
        """
        tensors = [tensor.detach() for tensor in tensors]
        dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else dtypes
        copied: Future[list[torch.Tensor]]
        if self._device.type != "cuda":
            copied = Future()
            copied.set_result(
                [
                    torch.empty(tensor.shape, dtype=dtype, device="cpu").copy_(tensor)
                    for tensor, dtype in zip(tensors, dtypes, strict=True)
                ]
            )
            return copied
        chunks = list(_chunks([tensor.nbytes for tensor in tensors]))
        self._pin(staging_bytes(sum(map(_size, chunks))))
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        read: Future[Any] = Future()
        self._reads.append(read)
        copied = self._thread.submit(self._copy, tensors, dtypes, chunks, read)
        if temporary:
            del tensors
            copied.exception()
        return copied

    def wait(self) -> None:
        """Make the current stream wait until the tensors of all copies have been read. The host
        waits until the last chunk of each copy has been issued."""
        for read in self._reads:
            if (event := read.result()) is not None:
                torch.cuda.current_stream(self._device).wait_event(event)
        self._reads.clear()

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    def _copy(
        self,
        tensors: Sequence[torch.Tensor],
        dtypes: Sequence[torch.dtype],
        chunks: Sequence[Sequence[_Part]],
        read: Future[Any],
    ) -> list[torch.Tensor]:
        """Make the copies, in the thread; ``read`` receives the event of the last chunk."""
        event = None
        try:
            copies = [
                torch.empty(tensor.shape, dtype=dtype, device="cpu")
                for tensor, dtype in zip(tensors, dtypes, strict=True)
            ]
            targets = [copy.view(-1) for copy in copies]
            halves = [self._pinned[:CHUNK_BYTES], self._pinned[CHUNK_BYTES:]]
            arrived: tuple[Any, Sequence[_Part], torch.Tensor] | None = None
            for number, chunk in enumerate(chunks):
                half = halves[number % 2]
                with torch.cuda.stream(self._stream):
                    for span in chunk:
                        source = _bytes(tensors[span.tensor])[span.start : span.stop]
                        _at(half, span).copy_(source, non_blocking=True)
                    event = self._stream.record_event()
                if number == len(chunks) - 1:
                    read.set_result(event)
                if arrived is not None:
                    _unload(*arrived, tensors, targets)
                arrived = event, chunk, half
            if arrived is not None:
                _unload(*arrived, tensors, targets)
            return copies
        finally:
            if not read.done():
                read.set_result(event)

    def _pin(self, nbytes: int) -> None:
        if nbytes <= self._pinned.nbytes:
            return
        self._thread.submit(int).result()  # earlier copies no longer use the memory
        cuda: Any = torch.cuda.cudart()
        if self._pinned.nbytes:
            cuda.cudaHostUnregister(self._pinned.data_ptr())
        self._pinned = torch.empty(0, dtype=torch.uint8, device="cpu")
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        code = int(cuda.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise MemoryError(
                f"cannot pin {nbytes / 2**20:.0f} MiB of host memory: cudaHostRegister returned "
                f"{code}. Set asynchronous_checkpoints: false and snapshot_every: null to "
                "need none"
            )
        self._pinned = memory


def staging_bytes(nbytes: int) -> int:
    """Return the bytes of pinned memory used for copying ``nbytes`` bytes."""
    return min(nbytes, 2 * CHUNK_BYTES)


def _chunks(sizes: Sequence[int]) -> Iterator[list[_Part]]:
    """Split tensors of the given sizes in bytes into chunks of at most :data:`CHUNK_BYTES`."""
    chunk: list[_Part] = []
    offset = 0
    for tensor, size in enumerate(sizes):
        start = 0
        while start < size:
            if offset >= CHUNK_BYTES:
                yield chunk
                chunk, offset = [], 0
            stop = min(size, start + CHUNK_BYTES - offset)
            chunk.append(_Part(tensor, start, stop, offset))
            offset += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            start = stop
    if chunk:
        yield chunk


def _size(chunk: Sequence[_Part]) -> int:
    last = chunk[-1]
    return last.offset + -(-(last.stop - last.start) // ALIGNMENT) * ALIGNMENT


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of one element may have any strides.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _at(half: torch.Tensor, part: _Part) -> torch.Tensor:
    return half[part.offset : part.offset + part.stop - part.start]


def _unload(
    event: Any,
    chunk: Sequence[_Part],
    half: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
) -> None:
    """Copy a chunk from pinned memory to its tensors' final memory, once the device has written
    it."""
    event.synchronize()
    for span in chunk:
        dtype = tensors[span.tensor].dtype
        start, stop = (end // dtype.itemsize for end in (span.start, span.stop))
        targets[span.tensor][start:stop].copy_(_at(half, span).view(dtype))


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
