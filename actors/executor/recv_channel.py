"""Receiving end of a directed edge; :mod:`raymm.actors.executor.send_channel` is the sending
end."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.layouts import MOST_LAYOUTS, Due, Layouts
from raymm.actors.executor.link import Link, name_ranks
from raymm.actors.executor.message_layout import Layout, unpack
from raymm.actors.executor.send_channel import SendChannel
from raymm.actors.modules.message import Message
from raymm.errors import ChannelError, InternalError
from raymm.kernels.collectives.flat import gather_shares
from raymm.kernels.collectives.waiting import wait
from raymm.kernels.host_copies import to_device
from raymm.scheduler.graph.direction import posted_receives
from raymm.scheduler.plan.resharding import Resharding


class _Buffer(NamedTuple):
    """Receive buffer for a process's part of a tensor.

    Attributes:
        size: shape of the buffer, which is a flat share if several processes receive the tensor.
        parts: (link, start, stop) of the elements from each sender; None for a single sender.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    size: tuple[int, ...]
    parts: tuple[tuple[Link, int, int], ...] | None


class _Incoming(NamedTuple):
    """Receive plan for messages of one layout."""

    layout: Layout
    buffers: tuple[_Buffer, ...]
    side_bytes: int


class _Posted(NamedTuple):
    """Message that is being received: ``works`` fill ``shares``, ``host_work`` fills ``side``."""

    due: Due[_Incoming]
    route: _Incoming
    shares: tuple[torch.Tensor, ...]
    works: tuple[dist.Work, ...]
    side: torch.Tensor | None = None
    host_work: dist.Work | None = None


class RecvChannel:
    """One process's part of the receiving end of an edge.

    Args:
        links: links to the senders of its messages, by index among the senders.
        gathered: group of all receivers in their order; None for a single receiver.
        outputs: if messages are gradients, the channel that sent the corresponding outputs.
        in_order: True to post receives exactly when :meth:`post` is called, even if that has to
            wait for a description. Needed for NCCL, where a process's operations may block each
            other.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        device: torch.device,
        timeout: timedelta,
        resharding: Resharding = Resharding(1, 1),  # noqa: B008  frozen
        gathered: dist.ProcessGroup | None = None,
        in_order: bool = False,
        outputs: SendChannel | None = None,
    ) -> None:
        self._links = dict(links)
        self._device = device
        self._timeout = timeout
        self._resharding = resharding
        self._index = index = 0 if gathered is None else gathered.rank()
        self._gathered = gathered
        self.in_order = in_order
        self._most_posted = posted_receives(in_order)
        self._only = next(iter(self._links.values())) if resharding == Resharding(1, 1) else None
        self._metadata_link = self._links.get(resharding.metadata_sender(index))
        # On a GPU the device waits, limited by NCCL's timeout.
        self._tensor_timeout = None if device.type == "cuda" else timeout
        self._outputs = outputs
        self._gradient_route = lru_cache(MOST_LAYOUTS)(self._incoming)
        self._layouts: Layouts[_Incoming] = Layouts(self._incoming)
        self._due: deque[Due[_Incoming]] = deque()
        self._posted: deque[_Posted] = deque()

    def expect(self, keys: Sequence[object]) -> None:
        """Announce the keys of the step's messages, in order. Unless order matters, post receives
        ahead."""
        self._due = self._layouts.due(keys) if self._outputs is None else deque(
            Due(key, None) for key in keys
        )
        if not self.in_order:
            self._post_ahead()

    def post(self) -> None:
        """Post the receive of the next message now. Raise a ``ChannelError`` if its description did
        not arrive in time, or the peer is gone."""
        try:
            self._learn_layout()
        except RuntimeError as error:
            raise self._lost(error) from error
        self._post_next()

    def _post_next(self) -> bool:
        """Post the receive of the next message. Return False if its layout is neither known nor
        predicted."""
        due = self._due[0]
        route = due.route or self._described(due.key)
        if route is None:
            return False
        self._due.popleft()
        self._posted.append(self._irecv(due, route))
        return True

    def _described(self, key: object) -> _Incoming | None:
        if self._outputs is None:
            return self._layouts.described(key)
        layout = self._outputs.layout(key)
        return None if layout is None else self._gradient_route(layout.of_gradients())

    def _post_ahead(self) -> None:
        while len(self._posted) < self._most_posted and self._due and self._post_next():
            pass

    def _learn_layout(self) -> None:
        due = self._due[0]
        if due.route is None and self._described(due.key) is None:
            if self._outputs is not None:
                raise InternalError(f"no message was sent for the gradient with key {due.key!r}")
            self._layouts.describe(due.key, self._recv_layout())

    def _lost(self, error: RuntimeError) -> ChannelError:
        return ChannelError(f"no message from {name_ranks(self._links)}: {error}")

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
        if self._gathered is not None:  # padded, so that all receivers' shares have the same size
            units = self._resharding.units // self._resharding.receivers
            share = units * self._resharding.unit(length)
        return (share,), tuple(
            (self._links[transfer.sender], transfer.start - start, transfer.stop - start)
            for transfer in self._resharding.parts(length) if transfer.receiver == self._index
        )

    def _irecv(self, due: Due[_Incoming], route: _Incoming, aside: bool = False) -> _Posted:
        shares, works = [], []
        device = torch.device("cpu") if aside else self._device
        for _, dtype, size, transfers in route.buffers:
            share = torch.empty(size, dtype=dtype, device=device)
            shares.append(share)
            if transfers is None:
                assert self._only is not None
                irecv = self._only.irecv_aside if aside else self._only.irecv
                works.append(irecv(share))
            else:
                works += [
                    (link.irecv_aside if aside else link.irecv)(share[start:stop])
                    for link, start, stop in transfers
                ]
        side_bytes = route.side_bytes + due.expected
        if not side_bytes:
            return _Posted(due, route, tuple(shares), tuple(works))
        assert self._metadata_link is not None
        side = torch.empty(side_bytes, dtype=torch.uint8, device="cpu")
        link = self._metadata_link
        host_work = (link.irecv_aside if aside else link.irecv_on_host)(side)
        return _Posted(due, route, tuple(shares), tuple(works), side, host_work)

    def recv(self) -> Message:
        """Return the next message, with its side tensors in host memory. On a GPU the device waits
        for the tensors, not the host. Raise a ``ChannelError`` if the message did not arrive in
        time, or the peer is gone."""
        try:
            if not self._posted:
                self._learn_layout()
                self._post_next()
            if not self.in_order:
                self._post_ahead()
            due, route, shares, works, side, host_work = self._posted.popleft()
            for work in works:
                wait(work, self._tensor_timeout)
            if host_work is not None:
                wait(host_work, self._timeout)
            if due.expected:
                assert side is not None
                if side[-1]:
                    route, shares, side = self._recv_unexpected(due)
            if self._only is None:
                shares = tuple(map(self._whole, shares, route.buffers))
        except RuntimeError as error:
            raise self._lost(error) from error
        side_tensors = {}
        if route.layout.side:
            assert side is not None
            side_tensors = unpack(route.layout, side)
        return Message(shares, side_tensors, route.layout.names)

    def _recv_unexpected(
        self, due: Due[_Incoming]
    ) -> tuple[_Incoming, tuple[torch.Tensor, ...], torch.Tensor | None]:
        """Receive a message again over host memory, because its layout differs from the
        prediction."""
        route = self._layouts.describe(due.key, self._recv_layout(aside=True))
        posted = self._irecv(due._replace(expected=False), route, aside=True)
        for work in (*posted.works, *([] if posted.host_work is None else [posted.host_work])):
            wait(work, self._timeout)
        return route, tuple(to_device(t, self._device) for t in posted.shares), posted.side

    def _whole(self, share: torch.Tensor, buffer: _Buffer) -> torch.Tensor:
        if self._gathered is not None:
            share = gather_shares(share, self._gathered)[: prod(buffer.shape)]
        return share.view(buffer.shape)

    def _recv_layout(self, aside: bool = False) -> Layout:
        link = self._metadata_link
        assert link is not None
        irecv = link.irecv_aside if aside else link.irecv_on_host
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        wait(irecv(length), self._timeout)
        header = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        wait(irecv(header), self._timeout)
        return Layout.decode(header.numpy().tobytes())
