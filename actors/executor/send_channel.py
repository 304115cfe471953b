"""Sending end of a directed edge; :mod:`raymm.actors.executor.recv_channel` is the receiving end.

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
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist

from raymm.actors.executor.layouts import MOST_LAYOUTS, Due, Layouts
from raymm.actors.executor.link import Link, name_ranks
from raymm.actors.executor.message_layout import Layout, pack
from raymm.actors.modules.message import Message
from raymm.errors import ChannelError
from raymm.kernels.collectives.flat import scatter_sum
from raymm.kernels.collectives.waiting import wait
from raymm.kernels.host_copies import on_host
from raymm.scheduler.plan.resharding import Resharding

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
