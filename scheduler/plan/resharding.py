"""Resharding of a tensor between two groups of processes that each hold it whole.

Every sender holds the tensor, and every receiver needs it: the features of a module, or the hidden
state between two tensor-parallel stages. Each sender sends its share and each receiver is sent its
share, so every element travels once. The receivers then all-gather their shares, where links are
fast. This generalises Megatron-LM's scatter-gather optimisation to any two degrees.

A share is a contiguous range of the flattened tensor. Ranges are multiples of a *unit*, so that the
pairs of processes with messages do not depend on the tensor's size, and the shares of a sender's
subgroup are contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple


class Part(NamedTuple):
    """Elements ``[start, stop)`` that ``sender`` sends to ``receiver``; never empty."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True)
class Resharding:
    """Resharding from ``senders`` to ``receivers`` processes, numbered within their groups."""

    senders: int
    receivers: int

    @property
    def units(self) -> int:
        """Number of units of a tensor."""
        return lcm(self.senders, self.receivers)

    def unit(self, length: int) -> int:
        """Return the elements per unit of a tensor of ``length`` elements; the last units may be
        short."""
        return -(-length // self.units)

    def sent(self, sender: int, length: int) -> tuple[int, int]:
        return self._range(sender, self.senders, length)

    def received(self, receiver: int, length: int) -> tuple[int, int]:
        return self._range(receiver, self.receivers, length)

    def _range(self, index: int, count: int, length: int) -> tuple[int, int]:
        share = self.units // count * self.unit(length)
        return min(index * share, length), min((index + 1) * share, length)

    def parts(self, length: int) -> Iterator[Part]:
        """Yield the parts to send, in the order in which both ends of every link process them."""
        for sender, receiver in self.links():
            start, stop = self.sent(sender, length)
            low, high = self.received(receiver, length)
            if max(start, low) < min(stop, high):
                yield Part(sender, receiver, max(start, low), min(stop, high))

    def links(self) -> Iterator[tuple[int, int]]:
        """Yield the (sender, receiver) pairs that may have a part, for any length."""
        for sender in range(self.senders):
            first = sender * self.receivers // self.senders
            last = -(-(sender + 1) * self.receivers // self.senders)
            for receiver in range(first, last):
                yield sender, receiver

    def metadata_sender(self, receiver: int) -> int:
        """Return the sender of a receiver's first part, which also sends the metadata."""
        return receiver * self.senders // self.receivers
