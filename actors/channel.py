"""Channels: the transport of one directed edge between two ranks.

A message is its tensors plus one byte buffer with all side tensors. Nothing but data
travels once a layout is known: both ends know from the step's metadata which layout a
microbatch has (its ``key``), and only the first message with a new key is preceded by a
description of it. Receives are posted ahead of need; a sent tensor lives until its send
has completed.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.stages.message import Message

# Receives posted ahead of need on each edge.
PREFETCH = 2


class ChannelError(RuntimeError):
    """A message that does not look as its metadata said, or never came."""


class Layout(NamedTuple):
    """Shapes and dtypes of a message: ``tensors`` and named ``side`` entries."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    side: tuple[tuple[str, tuple[int, ...], str], ...]

    @classmethod
    def of(cls, message: Message) -> Layout:
        return cls(
            tuple((tuple(t.shape), str(t.dtype)) for t in message.tensors),
            tuple((name, tuple(t.shape), str(t.dtype)) for name, t in message.side.items()),
        )

    def encode(self) -> bytes:
        return json.dumps([self.tensors, self.side]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        tensors, side = json.loads(data)
        return cls(
            tuple((tuple(shape), dtype) for shape, dtype in tensors),
            tuple((name, tuple(shape), dtype) for name, shape, dtype in side),
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"a message names the dtype {name!r}")
    return dtype


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for size in shape:
        count *= size
    return count


def _pack(side: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in side.values()])


def _unpack(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    side, offset = {}, 0
    for name, shape, dtype_name in layout.side:
        dtype = _dtype(dtype_name)
        size = _nbytes(shape, dtype)
        # clone: a view at an odd byte offset is not aligned for its dtype.
        side[name] = buffer[offset : offset + size].clone().view(dtype).view(shape)
        offset += size
    return side


class SendChannel:
    """The sending end of an edge."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._layouts: dict[object, Layout] = {}
        self._sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._sent_before: list[tuple[dist.Work, torch.Tensor]] = []

    def send(self, key: object, message: Message) -> None:
        """Start sending; returns at once.

        Raises:
            ChannelError: if a message with this key looked different before.
        """
        layout = Layout.of(message)
        known = self._layouts.get(key)
        if known is None:
            self._layouts[key] = layout
            header = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
            self._isend(torch.tensor([header.numel()], device=self._device))
            self._isend(header.to(self._device))
        elif known != layout:
            raise ChannelError(
                f"a message with the metadata {key!r} had the layout {known} and now has {layout}; "
                "what a stage returns must depend on the shapes of its inputs only"
            )
        for tensor in message.tensors:
            self._isend(tensor.detach().contiguous())
        if message.side:
            self._isend(_pack(message.side))

    def _isend(self, tensor: torch.Tensor) -> None:
        if tensor.numel():
            work = dist.isend(tensor, self._peer, group=self._group)
            self._sent.append((work, tensor))

    @property
    def held(self) -> int:
        """How many sent tensors are kept alive."""
        return len(self._sent) + len(self._sent_before)

    def end_step(self, timeout: timedelta) -> None:
        """Let go of what was sent before the step that ends now.

        A gloo send counts as completed only once it was waited for, and its tensor must live
        until then. Waiting one step later costs nothing: the peer has long received it.

        Raises:
            ChannelError: if the peer is gone.
        """
        try:
            for work, _ in self._sent_before:
                work.wait(timeout)
        except RuntimeError as error:
            raise ChannelError(f"a message to rank {self._peer} was lost: {error}") from error
        self._sent_before, self._sent = self._sent, []


class _Posted(NamedTuple):
    layout: Layout
    tensors: tuple[torch.Tensor, ...]
    side: torch.Tensor | None
    works: tuple[dist.Work, ...]


class RecvChannel:
    """The receiving end of an edge."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, device: torch.device, timeout: timedelta
    ) -> None:
        self._group = group
        self._peer = peer
        self._device = device
        self._timeout = timeout
        self._layouts: dict[object, Layout] = {}
        self._expected: deque[object] = deque()
        self._posted: deque[_Posted] = deque()

    def expect(self, keys: Sequence[object]) -> None:
        """Announce the keys of the step's messages, in order."""
        self._expected.extend(keys)
        self._post()

    def _post(self) -> None:
        """Post receives until enough are ahead, or the next layout is not known yet."""
        while self._expected and len(self._posted) < PREFETCH:
            layout = self._layouts.get(self._expected[0])
            if layout is None:
                return
            self._expected.popleft()
            self._posted.append(self._irecv(layout))

    def _irecv(self, layout: Layout) -> _Posted:
        tensors = tuple(
            torch.empty(shape, dtype=_dtype(dtype), device=self._device)
            for shape, dtype in layout.tensors
        )
        size = sum(_nbytes(shape, _dtype(dtype)) for _, shape, dtype in layout.side)
        side = torch.empty(size, dtype=torch.uint8, device=self._device) if size else None
        works = [
            dist.irecv(tensor, self._peer, group=self._group)
            for tensor in (*tensors, side)
            if tensor is not None and tensor.numel()
        ]
        return _Posted(layout, tensors, side, tuple(works))

    def recv(self) -> Message:
        """The next expected message; waits for it.

        Raises:
            ChannelError: if it does not come in time or the peer is gone.
        """
        try:
            if not self._posted:
                key = self._expected[0]
                self._layouts[key] = self._recv_layout()
                self._post()
            posted = self._posted.popleft()
            for work in posted.works:
                work.wait(self._timeout)
        except RuntimeError as error:
            raise ChannelError(f"no message from rank {self._peer}: {error}") from error
        self._post()
        side = {} if posted.side is None else _unpack(posted.layout, posted.side)
        return Message(posted.tensors, side)

    def _recv_layout(self) -> Layout:
        length = torch.zeros(1, dtype=torch.int64, device=self._device)
        dist.irecv(length, self._peer, group=self._group).wait(self._timeout)
        header = torch.empty(int(length), dtype=torch.uint8, device=self._device)
        dist.irecv(header, self._peer, group=self._group).wait(self._timeout)
        return Layout.decode(header.cpu().numpy().tobytes())
