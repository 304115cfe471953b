"""Channels of a directed edge: :class:`SendChannel` is the sending end, :class:`RecvChannel` the
receiving end, each with a :class:`Link` to every process at the other end.

A message is its tensors plus one byte buffer with all side tensors. Once a layout is known, nothing
but data is transferred: the step's metadata gives each microbatch a key that determines its layout.
A message with a new key is preceded by a description, unless both ends predict the same layout
(:mod:`raymm.actors.executor.layouts`); then a byte confirms or rejects the prediction. After a
rejection the data already sent are discarded, and the message follows with its description over
host memory. Gradients have the layouts of the corresponding outputs and need no description.

Receives are posted ahead of time: on a GPU where the program schedules them, on a CPU a few
messages ahead. A sent tensor is kept until its send has completed.

Side tensors are read by the host (lengths, labels, assignment of items), so they are transferred
between hosts, and the host waits for no device. On a GPU, work issued next runs after the tensors
in the device's order.

If an end has several processes, each sends or receives its share of every tensor
(:mod:`raymm.scheduler.plan.resharding`), and the receivers gather their shares. A receiver gets the
side tensors whole from one sender. Gradients that are partial sums on the senders are
reduce-scattered first, so that each sender has the part of the sum that it sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.layouts import MOST_LAYOUTS, Due, Layout, Layouts, pack, unpack
from raymm.actors.modules.message import Message
from raymm.errors import ChannelError, InternalError
from raymm.kernels.collectives.flat import gather_shares, scatter_sum
from raymm.kernels.collectives.waiting import PointToPoint, receive_from, send_to, wait
from raymm.kernels.host_copies import on_host, to_device
from raymm.scheduler.graph.module_graph import posted_receives
from raymm.scheduler.plan.resharding import Resharding


class Link:
    """Connection to one process at the other end of an edge.

    Args:
        group: group of the two processes, shared by all edges with messages in the same direction.
        tag: number of the edge. NCCL has no tags: messages of all edges that share a group are
            received in the order in which they were sent.
        host_group: group for descriptions and side tensors in host memory; ``group`` by default.

    Attributes:
        isend, irecv: start sending a contiguous tensor, or receiving into one.
        isend_to_host, irecv_on_host: the same for tensors in host memory.
        isend_aside, irecv_aside: the same for host memory, independent of the order of other
            messages.
    """

    def __init__(
        self, group: PointToPoint, peer: int, tag: int = 0,
        host_group: PointToPoint | None = None,
    ) -> None:  # fmt: skip
        self.peer = peer
        host_group = host_group or group
        self.isend, self.irecv = _operations(group, 2 * tag)
        self.isend_to_host, self.irecv_on_host = _operations(host_group, 2 * tag)
        self.isend_aside, self.irecv_aside = _operations(host_group, 2 * tag + 1)


Operation = Callable[[torch.Tensor], dist.Work]


def _operations(group: PointToPoint, tag: int) -> tuple[Operation, Operation]:
    number = 1 - group.rank()
    return partial(send_to, group, number, tag), partial(receive_from, group, number, tag)


def name_ranks(links: Mapping[int, Link]) -> str:
    peers = sorted(link.peer for link in links.values())
    return f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {peers}"


Sent = list[tuple[dist.Work, torch.Tensor]]
"""Operations of a message, each with the tensor that it keeps alive."""
_AS_EXPECTED = torch.zeros(1, dtype=torch.uint8, device="cpu")


class _Outgoing(NamedTuple):
    """Send plan for messages of one layout.

    Attributes:
        parts: per tensor (link, start, stop) for each receiver, a range of elements of the tensor
            or of this process's share of the sum; None to send all of it to the only receiver.
    """

    layout: Layout
    parts: tuple[tuple[tuple[Link, int, int], ...] | None, ...]
    nbytes: int
    side_bytes: int


class SendChannel:
    """One process's part of the sending end of an edge.

    Args:
        links: links to the receivers of its messages, by index among the receivers.
        summed: group of the senders if each has a partial sum of the message; None otherwise.
        gradients: True if messages are gradients of what this process received on the reverse edge.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        device: torch.device,
        resharding: Resharding = Resharding(1, 1),  # noqa: B008  frozen
        index: int = 0,
        summed: dist.ProcessGroup | None = None,
        gradients: bool = False,
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
        self._layouts: Layouts[_Outgoing] = Layouts(self._outgoing)
        self._due: deque[Due[_Outgoing]] = deque()
        self._gradient_route = lru_cache(MOST_LAYOUTS)(self._outgoing) if gradients else None
        self._last: _Outgoing | None = None  # of gradients
        # Messages whose tensors are kept alive, oldest first. The first ``_before`` of them were
        # sent before the step that ended last.
        self._under_way: deque[Sent] = deque()
        self._before = 0
        self._bound: int | None = None
        self.sent_bytes = 0
        """Bytes sent so far, without descriptions."""
        self.sent_side_bytes = 0
        """Bytes of side tensors among ``sent_bytes``."""

    def expect(self, keys: Sequence[object], bound: int | None = None) -> None:
        """Announce the step's messages.

        Args:
            keys: keys of the messages, in order; they determine the layouts.
            bound: largest number of messages in flight; None for no limit. A further send waits for
                the oldest message; on a GPU the device waits.
        """
        self._bound = bound
        if self._gradient_route is None:
            self._due = self._layouts.due(keys)

    def layout(self, key: object) -> Layout | None:
        """Return the layout of earlier messages with a key; None if there were none."""
        return self._layouts.certain(key)

    def send(self, message: Message) -> None:
        """Start sending the next message. Returns at once, unless partial sums have to be reduced
        or too many messages are in flight. Tensors of ``message``, which are detached, are kept
        until they are received. Raise a ``ChannelError`` if an earlier message with this key had
        another layout, or the peer is gone."""
        if self._bound is not None:
            while len(self._under_way) >= self._bound:
                self._let_go(None)
        sent: Sent = []
        self._under_way.append(sent)
        if self._gradient_route is not None:
            route = self._last
            if route is None or not route.layout.is_of(message):
                route = self._last = self._gradient_route(Layout.of(message))
        else:
            key, route, expected = self._due.popleft()
            if expected:
                assert route is not None
                self._send_expected(key, route, message, sent)
                return
            if route is None and (route := self._layouts.described(key)) is None:
                layout = Layout.of(message)
                route = self._layouts.describe(key, layout)
                self._describe(layout, sent)
            if not route.layout.is_of(message):
                raise ChannelError(
                    f"a message with the metadata {key!r} had the layout {route.layout} and now "
                    f"has {Layout.of(message)}; the outputs of a stage must depend only on the "
                    "shapes of its inputs"
                )
        self._send_tensors(route, message.tensors, sent)
        if message.side:
            self._send_to_host(pack(message.side), sent)

    def _send_expected(self, key: object, route: _Outgoing, message: Message, sent: Sent) -> None:
        """Send a message whose layout both ends have predicted."""
        if route.layout.is_of(message):
            self._layouts.confirm(key)
            self._send_tensors(route, message.tensors, sent)
            side = [pack(message.side)] if message.side else []
            self._send_to_host(torch.cat([*side, _AS_EXPECTED]), sent)
            return
        void = [
            torch.zeros(shape, dtype=dtype, device=self._device)
            for shape, dtype in route.layout.tensors
        ]
        self._send_tensors(route, void, sent)
        not_so = torch.ones(route.layout.side_bytes + 1, dtype=torch.uint8, device="cpu")
        self._send_to_host(not_so, sent)
        layout = Layout.of(message)
        self._describe(layout, sent, aside=True)
        route = self._layouts.describe(key, layout)
        self._send_tensors(route, [on_host(t) for t in message.tensors], sent, aside=True)
        if message.side:
            self._send_to_host(pack(message.side), sent, aside=True)

    def _send_tensors(
        self, route: _Outgoing, tensors: Sequence[torch.Tensor], sent: Sent, aside: bool = False
    ) -> None:
        self.sent_bytes += route.nbytes
        self.sent_side_bytes += route.side_bytes
        for tensor, transfers in zip(tensors, route.parts, strict=True):
            tensor = tensor.contiguous()
            if transfers is None:
                assert self._only is not None
                isend = self._only.isend_aside if aside else self._only.isend
                sent.append((isend(tensor), tensor))
            else:
                self._send_parts(tensor.view(-1), transfers, sent, aside)

    def _send_to_host(self, packed: torch.Tensor, sent: Sent, aside: bool = False) -> None:
        for receiver in self._metadata_receivers:
            link = self._links[receiver]
            isend = link.isend_aside if aside else link.isend_to_host
            sent.append((isend(packed), packed))

    def _outgoing(self, layout: Layout) -> _Outgoing:
        transfer_lists = [self._parts_of(prod(shape)) for shape, _ in layout.tensors]
        nbytes = side_bytes = len(self._metadata_receivers) * layout.side_bytes
        for transfers, (shape, dtype) in zip(transfer_lists, layout.tensors, strict=True):
            sent = (
                prod(shape) if transfers is None
                else sum(stop - start for _, start, stop in transfers)
            )
            nbytes += sent * dtype.itemsize
        return _Outgoing(layout, tuple(transfer_lists), nbytes, side_bytes)

    def _parts_of(self, length: int) -> tuple[tuple[Link, int, int], ...] | None:
        if self._only is not None and length:
            return None
        offset = self._share(length) * self._summed.rank() if self._summed is not None else 0
        return tuple(
            (self._links[transfer.receiver], transfer.start - offset, transfer.stop - offset)
            for transfer in self._resharding.parts(length) if transfer.sender == self._index
        )

    def _share(self, length: int) -> int:
        """Return the number of elements of a sum that each sender gets."""
        assert self._summed is not None
        return self._resharding.units * self._resharding.unit(length) // self._summed.size()

    def _describe(self, layout: Layout, sent: Sent, aside: bool = False) -> None:
        header = torch.frombuffer(bytearray(layout.encode()), dtype=torch.uint8)
        for tensor in (torch.tensor([header.numel()], device="cpu"), header):
            self._send_to_host(tensor, sent, aside)

    def _send_parts(
        self, flat: torch.Tensor, parts: Sequence[tuple[Link, int, int]], sent: Sent,
        aside: bool,
    ) -> None:  # fmt: skip
        if self._summed is not None and flat.numel():
            flat = scatter_sum(flat, self._share(flat.numel()), self._summed)
        for link, start, stop in parts:
            payload = flat[start:stop]
            isend = link.isend_aside if aside else link.isend
            sent.append((isend(payload), payload))

    @property
    def held(self) -> int:
        return len(self._under_way)

    def _let_go(self, timeout: timedelta | None) -> None:
        """Wait until the oldest message was received, and release it."""
        try:
            for work, tensor in self._under_way[0]:
                wait(work, None if tensor.device.type == "cuda" else timeout)
        except RuntimeError as error:
            peers = name_ranks(self._links)
            raise ChannelError(f"a message to {peers} was lost: {error}") from error
        self._under_way.popleft()
        self._before = max(0, self._before - 1)

    def end_step(self, timeout: timedelta) -> None:
        """Release messages sent before the step that ends now; on a GPU, all messages. A gloo send
        completes only when it is waited for. Waiting one step later is free, because the peer has
        received the message by then. On a GPU the device waits, and memory is reused after that.
        Raise a ``ChannelError`` if the peer is gone."""
        on_gpu = self._device.type == "cuda"
        while self._under_way if on_gpu else self._before:
            self._let_go(timeout)
        self._before = len(self._under_way)


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
