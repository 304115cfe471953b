"""The receiving end of a directed edge between two ranks
(:mod:`raymm.actors.executor.send_channel` is the other)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.link import Link, name_ranks
from raymm.actors.executor.message_layout import Layout, Layouts, unpack
from raymm.actors.faults.lost_processes import ChannelError
from raymm.actors.modules.message import Message
from raymm.kernels.collectives.flat import gather_shares
from raymm.kernels.collectives.waiting import wait
from raymm.scheduler.plan.resharding import Resharding

POSTED_AHEAD = 4
"""Messages of an edge whose receives are posted where nothing depends on the order."""


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

    route: _Incoming
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
        self._routes: Layouts[_Incoming] = Layouts()
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
        """Whether the layout of the next message is route, so that it can be received."""
        route = self._routes.get(self._expected[0])
        if route is None:
            return False
        self._expected.popleft()
        self._posted.append(self._irecv(route))
        return True

    def _post_ahead(self) -> None:
        while len(self._posted) < POSTED_AHEAD and self._expected and self._post_next():
            pass

    def _learn_layout(self) -> None:
        key = self._expected[0]
        if key not in self._routes:
            self._routes.add(key, self._incoming(self._recv_layout()))

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
        if self._gathered is not None:  # filled up, so that all receivers' are alike
            units = self._resharding.units // self._resharding.receivers
            share = units * self._resharding.unit(length)
        return (share,), tuple(
            (self._links[part.sender], part.start - start, part.stop - start)
            for part in self._resharding.parts(length) if part.receiver == self._index
        )

    def _irecv(self, route: _Incoming) -> _Posted:
        shares, works = [], []
        for _, dtype, size, parts in route.buffers:
            share = torch.empty(size, dtype=dtype, device=self._device)
            shares.append(share)
            if parts is None:
                assert self._only is not None
                works.append(self._only.irecv(share))
            else:
                works += [link.irecv(share[start:stop]) for link, start, stop in parts]
        if not route.side_bytes:
            return _Posted(route, tuple(shares), tuple(works))
        assert self._metadata_link is not None
        side = torch.empty(route.side_bytes, dtype=torch.uint8, device="cpu")
        host_work = self._metadata_link.irecv_on_host(side)
        return _Posted(route, tuple(shares), tuple(works), side, host_work)

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
            route, shares, works, side, host_work = self._posted.popleft()
            for work in works:
                wait(work, self._tensor_timeout)
            if host_work is not None:
                wait(host_work, self._timeout)
            if self._only is None:
                shares = tuple(map(self._whole, shares, route.buffers))
        except RuntimeError as error:
            raise self._lost(error) from error
        return Message(shares, {} if side is None else unpack(route.layout, side))

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
