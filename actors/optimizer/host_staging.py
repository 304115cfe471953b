"""Copies of a process's tensors in host memory, made by the device while training continues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any, NamedTuple

import torch

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
