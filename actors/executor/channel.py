"""Channels: the transport of one directed edge between two ranks.

A message is its tensors plus one byte buffer with all side tensors. Nothing but data
travels once a layout is known: both ends know from the step's metadata which layout a
microbatch has (its ``key``), and only the first message with a new key is preceded by a
description of it. Receives are posted ahead of need, when the step's program says; a sent
tensor lives until its send has completed.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.message_layout import Layout, Layouts, pack, unpack
from raymm.actors.faults.lost_processes import ChannelError
from raymm.actors.modules.message import Message
from raymm.kernels.collectives.flat import gather_shares, scatter_sum
from raymm.kernels.collectives.waiting import started, wait
from raymm.scheduler.plan.resharding import Resharding


@dataclass(frozen=True)
class Link:
    """The connection to one process of the other end.

    Attributes:
        group: of the two processes; all edges that have messages from the one to the other
            share it.
        peer: the other process.
        tag: of the edge. With NCCL, which knows no tags, messages of all edges that share a group
            are received in the order in which they were sent.
        host_group: of the same processes, for descriptions and side tensors, which hosts read:
            ``group`` itself if that moves the hosts' memory.
    """

    group: dist.ProcessGroup
    peer: int
    tag: int = 0
    host_group: dist.ProcessGroup | None = None

    def isend(self, tensor: torch.Tensor) -> dist.Work:
        return started(dist.isend(tensor, self.peer, group=self.group, tag=self.tag))

    def irecv(self, tensor: torch.Tensor) -> dist.Work:
        return started(dist.irecv(tensor, self.peer, group=self.group, tag=self.tag))

    def isend_to_host(self, tensor: torch.Tensor) -> dist.Work:
        group = self.host_group or self.group
        return started(dist.isend(tensor, self.peer, group=group, tag=self.tag))

    def irecv_on_host(self, tensor: torch.Tensor) -> dist.Work:
        group = self.host_group or self.group
        return started(dist.irecv(tensor, self.peer, group=group, tag=self.tag))


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
        self._layouts = Layouts()
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

        Raises:
            ChannelError: if a message with this key looked different before, or the peer is gone.
        """
        if self.bound is not None:
            while len(self._under_way) >= self.bound:
                self._let_go(None)
        self._under_way.append([])
        layout = Layout.of(message)
        earlier = self._layouts.get(key)
        if earlier is None:
            self._layouts.add(key, layout)
            header = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
            for receiver in self._metadata_receivers:
                for part in (torch.tensor([header.numel()], device="cpu"), header):
                    self._keep(self._links[receiver].isend_to_host(part), part)
        elif earlier != layout:
            raise ChannelError(
                f"a message with the metadata {key!r} had the layout {earlier} and now has "
                f"{layout}; what a stage returns must depend on the shapes of its inputs only"
            )
        for tensor in message.tensors:
            self._send(tensor.detach().contiguous().view(-1))
        if layout.side_bytes:
            packed = pack(message.side)
            for receiver in self._metadata_receivers:
                self.sent_bytes += packed.nbytes
                self._keep(self._links[receiver].isend_to_host(packed), packed)

    def _send(self, flat: torch.Tensor) -> None:
        length, offset = flat.numel(), 0
        if self._summed is not None and length:
            share = self._resharding.units * self._resharding.unit(length) // self._summed.size()
            offset = share * self._summed.rank()
            flat = scatter_sum(flat, share, self._summed)
        for part in self._resharding.parts(length):
            if part.sender == self._index:
                payload = flat[part.start - offset : part.stop - offset]
                self.sent_bytes += payload.nbytes
                self._isend(part.receiver, payload)

    def _isend(self, receiver: int, tensor: torch.Tensor) -> None:
        self._keep(self._links[receiver].isend(tensor), tensor)

    def _keep(self, work: dist.Work, tensor: torch.Tensor) -> None:
        self._under_way[-1].append((work, tensor))

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


class _Posted(NamedTuple):
    """A message's buffers while they are being received.

    Attributes:
        shares: flat, of every tensor; ``works`` fill them.
        side: bytes on the host; ``host_works`` fill them.
    """

    layout: Layout
    shares: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    side: torch.Tensor
    host_works: tuple[dist.Work, ...]


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
        self._in_order = in_order
        self._layouts = Layouts()
        self._expected: deque[object] = deque()
        self._due = 0  # of those expected, how many are to be posted as soon as they can be
        self._posted: deque[_Posted] = deque()

    def expect(self, keys: Sequence[object]) -> None:
        """Announce the keys of the step's messages, in order."""
        self._expected.extend(keys)

    def post(self) -> None:
        """Post the receive of the next message: now, or as soon as its layout is known if nothing
        depends on the order.

        Raises:
            ChannelError: if its description does not come in time or the peer is gone.
        """
        self._due += 1
        if self._in_order:
            try:
                self._learn_layout()
            except RuntimeError as error:
                raise self._lost(error) from error
        self._post_due()

    def _post_due(self) -> None:
        while self._due and self._expected[0] in self._layouts:
            layout = self._layouts.get(self._expected[0])
            assert layout is not None
            self._expected.popleft()
            self._due -= 1
            self._posted.append(self._irecv(layout))

    def _learn_layout(self) -> None:
        key = self._expected[0]
        if key not in self._layouts:
            self._layouts.add(key, self._recv_layout())

    def _lost(self, error: RuntimeError) -> ChannelError:
        return ChannelError(f"no message from {_ranks(self._links)}: {error}")

    def _irecv(self, layout: Layout) -> _Posted:
        shares, works = [], []
        for length, dtype in layout.buffers:
            start, _ = self._resharding.received(self._index, length)
            share = torch.empty(self._share(length), dtype=dtype, device=self._device)
            shares.append(share)
            works += [
                self._links[part.sender].irecv(share[part.start - start : part.stop - start])
                for part in self._resharding.parts(length)
                if part.receiver == self._index
            ]
        side = torch.empty(layout.side_bytes, dtype=torch.uint8, device="cpu")
        host_works = (self._metadata_link().irecv_on_host(side),) if layout.side_bytes else ()
        return _Posted(layout, tuple(shares), tuple(works), side, host_works)

    def _metadata_link(self) -> Link:
        return self._links[self._resharding.metadata_sender(self._index)]

    def _share(self, length: int) -> int:
        """Elements of a share with what fills it up, so that all receivers' are alike."""
        if self._gathered is None:
            return length
        return self._resharding.units // self._resharding.receivers * self._resharding.unit(length)

    def recv(self) -> Message:
        """The next expected message, its side tensors on the host. Waits for it; on a GPU, what the
        device is given next does.

        Raises:
            ChannelError: if it does not come in time or the peer is gone.
        """
        try:
            if not self._posted:
                self._due = max(self._due, 1)
                self._learn_layout()
                self._post_due()
            posted = self._posted.popleft()
            for work in posted.works:
                # Not with a timeout on a GPU: the host would wait. NCCL has one of its own.
                wait(work, None if self._device.type == "cuda" else self._timeout)
            for work in posted.host_works:
                wait(work, self._timeout)
            flat = [
                share if self._gathered is None else gather_shares(share, self._gathered)[:length]
                for share, (length, _) in zip(posted.shares, posted.layout.buffers, strict=True)
            ]
        except RuntimeError as error:
            raise self._lost(error) from error
        tensors = tuple(
            buffer.view(shape)
            for buffer, (shape, _) in zip(flat, posted.layout.tensors, strict=True)
        )
        return Message(tensors, unpack(posted.layout, posted.side))

    def _recv_layout(self) -> Layout:
        link = self._metadata_link()
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        wait(link.irecv_on_host(length), self._timeout)
        header = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        wait(link.irecv_on_host(header), self._timeout)
        return Layout.decode(header.numpy().tobytes())
