"""Channels: the transport of one directed edge between two ranks.

A message is its tensors plus one byte buffer with all side tensors. Nothing but data
travels once a layout is known: both ends know from the step's metadata which layout a
microbatch has (its ``key``), and only the first message with a new key is preceded by a
description of it. Receives are posted ahead of need: on a GPU when the step's program says, on a
CPU some messages ahead, so that what is sent finds its place and travels at once. A sent tensor
lives until its send has completed.

Side tensors are what hosts read (lengths, labels, whose items are whose), so they go from host to
host, and the receiving one need not wait for its device to read them. Nor does it wait for the
tensors: on a GPU what it issues next comes after them in the device's order.

Where an end is several processes, each sends or is sent its share of every tensor
(:mod:`raymm.scheduler.plan.resharding`), and the receivers gather their shares; side tensors a
receiver gets whole from one sender. Gradients that the senders have each a part of are summed on
the way, every process ending up with the sum's share that it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.message_layout import Layout, Layouts, pack, unpack
from raymm.actors.faults.lost_processes import ChannelError
from raymm.actors.modules.message import Message
from raymm.kernels.collectives.flat import gather_shares, scatter_sum
from raymm.kernels.collectives.waiting import receive_from, send_to, wait
from raymm.scheduler.plan.resharding import Resharding

POSTED_AHEAD = 4
"""Messages of an edge whose receives are posted where nothing depends on the order."""


class Link:
    """The connection to one process of the other end.

    Args:
        group: of the two processes; all edges that have messages from the one to the other
            share it.
        peer: the other process.
        tag: of the edge. With NCCL, which knows no tags, messages of all edges that share a group
            are received in the order in which they were sent.
        host_group: of the same processes, for descriptions and side tensors, which hosts read:
            ``group`` itself if that moves the hosts' memory.

    Attributes:
        isend, irecv: start sending a contiguous tensor, or receiving into one.
        isend_to_host, irecv_on_host: of hosts' memory.
    """

    def __init__(
        self, group: dist.ProcessGroup, peer: int, tag: int = 0,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        self.isend, self.irecv = _operations(group, peer, tag)
        self.isend_to_host, self.irecv_on_host = _operations(host_group or group, peer, tag)


Operation = Callable[[torch.Tensor], dist.Work]


def _operations(group: dist.ProcessGroup, peer: int, tag: int) -> tuple[Operation, Operation]:
    number = dist.get_group_rank(group, peer)
    return partial(send_to, group, number, tag), partial(receive_from, group, number, tag)


class _Outgoing(NamedTuple):
    """How a process sends messages of one layout.

    Attributes:
        parts: per tensor what it sends to whom, ``[start, stop)`` of the tensor's elements, or of
            its share of the sum; None for all of it to the only other process.
        nbytes: of all that it sends.
    """

    layout: Layout
    parts: tuple[tuple[tuple[Link, int, int], ...] | None, ...]
    nbytes: int


class SendChannel:
    """One process's part of the sending end of an edge.

    Args:
        links: by the receiver's number among the receivers; those with which it has messages.
        device: where tensors are.
        resharding: how many processes are at either end.
        index: this process's number among the senders.
        summed: the group of the senders that have each a part of the message, which is their
            sum. None if every sender has all of it.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        device: torch.device,
        resharding: Resharding = Resharding(1, 1),  # noqa: B008  frozen
        index: int = 0,
        summed: dist.ProcessGroup | None = None,
    ) -> None:
        self._links = dict(links)
        self._device = device
        self._resharding = resharding
        self._index = index
        self._summed = summed
        self._metadata_receivers = [
            r for r in self._links if resharding.metadata_sender(r) == index
        ]
        alone = resharding == Resharding(1, 1) and summed is None
        self._only = next(iter(self._links.values())) if alone else None
        self._known: Layouts[_Outgoing] = Layouts()
        # Messages whose tensors are kept, oldest first, of which the first so many were sent
        # before the step that ended last.
        self._under_way: deque[list[tuple[dist.Work, torch.Tensor]]] = deque()
        self._before = 0
        self.bound: int | None = None
        """Messages that may be under way; None for any number. Whoever sends another waits for the
        oldest: on a GPU, what the device is given next does."""
        self.sent_bytes = 0
        """Payload sent so far, without descriptions."""

    def send(self, key: object, message: Message) -> None:
        """Start sending; returns at once, unless parts are summed or too many messages are under
        way.

        Args:
            key: decides the layout.
            message: without gradients; its tensors live on until the receiver has them.

        Raises:
            ChannelError: if a message with this key looked different before, or the peer is gone.
        """
        if self.bound is not None:
            while len(self._under_way) >= self.bound:
                self._let_go(None)
        sent: list[tuple[dist.Work, torch.Tensor]] = []
        self._under_way.append(sent)
        layout, known = Layout.of(message), self._known.get(key)
        if known is None:
            known = self._outgoing(layout)
            self._known.add(key, known)
            self._describe(layout, sent)
        elif known.layout != layout:
            raise ChannelError(
                f"a message with the metadata {key!r} had the layout {known.layout} and now has "
                f"{layout}; what a stage returns must depend on the shapes of its inputs only"
            )
        self.sent_bytes += known.nbytes
        for tensor, parts in zip(message.tensors, known.parts, strict=True):
            tensor = tensor.contiguous()
            if parts is None:
                assert self._only is not None
                sent.append((self._only.isend(tensor), tensor))
            else:
                self._send_parts(tensor.view(-1), parts, sent)
        if message.side:
            packed = pack(message.side)
            for receiver in self._metadata_receivers:
                sent.append((self._links[receiver].isend_to_host(packed), packed))

    def _outgoing(self, layout: Layout) -> _Outgoing:
        parts = [self._parts_of(prod(shape)) for shape, _ in layout.tensors]
        nbytes = len(self._metadata_receivers) * layout.side_bytes
        for part, (shape, dtype) in zip(parts, layout.tensors, strict=True):
            sent = prod(shape) if part is None else sum(stop - start for _, start, stop in part)
            nbytes += sent * dtype.itemsize
        return _Outgoing(layout, tuple(parts), nbytes)

    def _parts_of(self, length: int) -> tuple[tuple[Link, int, int], ...] | None:
        if self._only is not None and length:
            return None
        offset = self._share(length) * self._summed.rank() if self._summed is not None else 0
        return tuple(
            (self._links[part.receiver], part.start - offset, part.stop - offset)
            for part in self._resharding.parts(length) if part.sender == self._index
        )

    def _share(self, length: int) -> int:
        """Elements of a sum that each of those who have parts of it gets."""
        assert self._summed is not None
        return self._resharding.units * self._resharding.unit(length) // self._summed.size()

    def _describe(self, layout: Layout, sent: list[tuple[dist.Work, torch.Tensor]]) -> None:
        header = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
        for receiver in self._metadata_receivers:
            for part in (torch.tensor([header.numel()], device="cpu"), header):
                sent.append((self._links[receiver].isend_to_host(part), part))

    def _send_parts(
        self, flat: torch.Tensor, parts: Sequence[tuple[Link, int, int]],
        sent: list[tuple[dist.Work, torch.Tensor]],
    ) -> None:  # fmt: skip
        if self._summed is not None and flat.numel():
            flat = scatter_sum(flat, self._share(flat.numel()), self._summed)
        for link, start, stop in parts:
            payload = flat[start:stop]
            sent.append((link.isend(payload), payload))

    @property
    def held(self) -> int:
        """How many sent messages are kept alive."""
        return len(self._under_way)

    def _let_go(self, timeout: timedelta | None) -> None:
        """Of the oldest message, once it was received."""
        try:
            for work, tensor in self._under_way[0]:
                wait(work, None if tensor.device.type == "cuda" else timeout)
        except RuntimeError as error:
            raise ChannelError(f"a message to {_ranks(self._links)} was lost: {error}") from error
        self._under_way.popleft()
        self._before = max(0, self._before - 1)

    def end_step(self, timeout: timedelta) -> None:
        """Let go of what was sent before the step that ends now; on a GPU, of all.

        A gloo send counts as completed only once it was waited for, and its tensor must live
        until then. Waiting one step later costs nothing: the peer has long received it. On a GPU
        it is the device that waits, and what is let go of is used again after that.

        Raises:
            ChannelError: if the peer is gone.
        """
        on_gpu = self._device.type == "cuda"
        while self._under_way if on_gpu else self._before:
            self._let_go(timeout)
        self._before = len(self._under_way)


def _ranks(links: Mapping[int, Link]) -> str:
    peers = sorted(link.peer for link in links.values())
    return f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {peers}"


class _Buffer(NamedTuple):
    """What a process receives of a tensor.

    Attributes:
        shape: of the tensor.
        size: of the buffer; a share of the tensor, where others have the rest.
        parts: which elements come from whom; None for all of them from the only other process.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    parts: tuple[tuple[Link, int, int], ...] | None


class _Incoming(NamedTuple):
    """How a process receives messages of one layout."""

    layout: Layout
    buffers: tuple[_Buffer, ...]
    side_bytes: int


class _Posted(NamedTuple):
    """A message's buffers while they are being received.

    Attributes:
        shares: of every tensor; ``works`` fill them.
        side: bytes on the host, if there are any; ``host_work`` fills them.
    """

    known: _Incoming
    shares: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    side: torch.Tensor | None = None
    host_work: dist.Work | None = None


class RecvChannel:
    """One process's part of the receiving end of an edge.

    Args:
        links: by the sender's number among the senders; those with which it has messages.
        device: where tensors are to be.
        timeout: how long a wait may take.
        resharding: how many processes are at either end.
        index: this process's number among the receivers.
        gathered: the group of all receivers; None if there is one only.
        in_order: receives are to be posted just when :meth:`post` is called, also if that takes
            waiting for a description: a process's operations may hold up one another (NCCL).
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        device: torch.device,
        timeout: timedelta,
        resharding: Resharding = Resharding(1, 1),  # noqa: B008  frozen
        index: int = 0,
        gathered: dist.ProcessGroup | None = None,
        in_order: bool = False,
    ) -> None:
        self._links = dict(links)
        self._device = device
        self._timeout = timeout
        self._resharding = resharding
        self._index = index
        self._gathered = gathered
        self.in_order = in_order
        self._only = next(iter(self._links.values())) if resharding == Resharding(1, 1) else None
        self._metadata_link = self._links.get(resharding.metadata_sender(index))
        # On a GPU it is the device that waits, for as long as NCCL has a timeout.
        self._tensor_timeout = None if device.type == "cuda" else timeout
        self._known: Layouts[_Incoming] = Layouts()
        self._expected: deque[object] = deque()
        self._posted: deque[_Posted] = deque()

    def expect(self, keys: Sequence[object]) -> None:
        """Announce the keys of the step's messages, in order. Where nothing depends on the order,
        receives are posted from here on, :data:`POSTED_AHEAD` at a time."""
        self._expected.extend(keys)
        if not self.in_order:
            self._post_ahead()

    def post(self) -> None:
        """Post the receive of the next message now.

        Raises:
            ChannelError: if its description does not come in time or the peer is gone.
        """
        try:
            self._learn_layout()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._post_next()

    def _post_next(self) -> bool:
        """Whether the layout of the next message is known, so that it can be received."""
        known = self._known.get(self._expected[0])
        if known is None:
            return False
        self._expected.popleft()
        self._posted.append(self._irecv(known))
        return True

    def _post_ahead(self) -> None:
        while len(self._posted) < POSTED_AHEAD and self._expected and self._post_next():
            pass

    def _learn_layout(self) -> None:
        key = self._expected[0]
        if key not in self._known:
            self._known.add(key, self._incoming(self._recv_layout()))

    def _lost(self, error: RuntimeError) -> ChannelError:
        return ChannelError(f"no message from {_ranks(self._links)}: {error}")

    def _incoming(self, layout: Layout) -> _Incoming:
        buffers = tuple(_Buffer(*tensor, *self._shares_of(*tensor)) for tensor in layout.tensors)
        return _Incoming(layout, buffers, layout.side_bytes)

    def _shares_of(
        self, shape: tuple[int, ...], dtype: torch.dtype
    ) -> tuple[tuple[int, ...], tuple[tuple[Link, int, int], ...] | None]:
        length = prod(shape)
        if self._only is not None:
            return tuple(shape), None if length else ()
        start, _ = self._resharding.received(self._index, length)
        share = length
        if self._gathered is not None:  # filled up, so that all receivers' are alike
            units = self._resharding.units // self._resharding.receivers
            share = units * self._resharding.unit(length)
        return (share,), tuple(
            (self._links[part.sender], part.start - start, part.stop - start)
            for part in self._resharding.parts(length) if part.receiver == self._index
        )

    def _irecv(self, known: _Incoming) -> _Posted:
        shares, works = [], []
        for _, dtype, size, parts in known.buffers:
            share = torch.empty(size, dtype=dtype, device=self._device)
            shares.append(share)
            if parts is None:
                assert self._only is not None
                works.append(self._only.irecv(share))
            else:
                works += [link.irecv(share[start:stop]) for link, start, stop in parts]
        if not known.side_bytes:
            return _Posted(known, tuple(shares), tuple(works))
        assert self._metadata_link is not None
        side = torch.empty(known.side_bytes, dtype=torch.uint8, device="cpu")
        host_work = self._metadata_link.irecv_on_host(side)
        return _Posted(known, tuple(shares), tuple(works), side, host_work)

    def recv(self) -> Message:
        """The next expected message, its side tensors on the host. Waits for it; on a GPU, what the
        device is given next does.

        Raises:
            ChannelError: if it does not come in time or the peer is gone.
        """
        try:
            if not self._posted:
                self._learn_layout()
                self._post_next()
            if not self.in_order:
                self._post_ahead()
            known, shares, works, side, host_work = self._posted.popleft()
            for work in works:
                wait(work, self._tensor_timeout)
            if host_work is not None:
                wait(host_work, self._timeout)
            if self._only is None:
                shares = tuple(map(self._whole, shares, known.buffers))
        except RuntimeError as error:
            raise self._lost(error) from error
        return Message(shares, {} if side is None else unpack(known.layout, side))

    def _whole(self, share: torch.Tensor, buffer: _Buffer) -> torch.Tensor:
        """A tensor, of this process's share of it."""
        if self._gathered is not None:
            share = gather_shares(share, self._gathered)[: prod(buffer.shape)]
        return share.view(buffer.shape)

    def _recv_layout(self) -> Layout:
        link = self._metadata_link
        assert link is not None
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        wait(link.irecv_on_host(length), self._timeout)
        header = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        wait(link.irecv_on_host(header), self._timeout)
        return Layout.decode(header.numpy().tobytes())
