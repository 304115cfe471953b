"""Channels: the transport of one directed edge between two ranks.

A message is its tensors plus one byte buffer with all side tensors. Nothing but data
travels once a layout is route: both ends know from the step's metadata which layout a
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
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.link import Link, name_ranks
from raymm.actors.executor.message_layout import Layout, Layouts, pack
from raymm.actors.faults.lost_processes import ChannelError
from raymm.actors.modules.message import Message
from raymm.kernels.collectives.flat import scatter_sum
from raymm.kernels.collectives.waiting import wait
from raymm.scheduler.plan.resharding import Resharding


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
        self._routes: Layouts[_Outgoing] = Layouts()
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
        layout, route = Layout.of(message), self._routes.get(key)
        if route is None:
            route = self._outgoing(layout)
            self._routes.add(key, route)
            self._describe(layout, sent)
        elif route.layout != layout:
            raise ChannelError(
                f"a message with the metadata {key!r} had the layout {route.layout} and now has "
                f"{layout}; what a stage returns must depend on the shapes of its inputs only"
            )
        self.sent_bytes += route.nbytes
        for tensor, parts in zip(message.tensors, route.parts, strict=True):
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
            peers = name_ranks(self._links)
            raise ChannelError(f"a message to {peers} was lost: {error}") from error
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
