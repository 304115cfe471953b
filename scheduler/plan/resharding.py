"""Which process sends which part of a tensor to which, between two groups that hold it whole.

All of the senders hold a tensor, all of the receivers are to have it (a module's features,
or the hidden state between two tensor-parallel stages). So each sender sends its share and
each receiver is sent its share, every element once; the receivers then gather their shares
among themselves, where links are fast. This is what Megatron-LM's scatter-gather
optimisation does between stages of one degree, for any two degrees.

A share is a contiguous range of the flattened tensor. Ranges are multiples of a *unit*, so
that which two processes have messages does not depend on the tensor's size, and shares of a
sender's subgroup are again contiguous.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple


class Part(NamedTuple):
    """Elements ``[start, stop)``, which ``sender`` sends to ``receiver``; never empty."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True)
class Resharding:
    """From ``senders`` to ``receivers`` processes, numbered within their groups."""

    senders: int
    receivers: int

    @property
    def units(self) -> int:
        """Units of a tensor."""
        return lcm(self.senders, self.receivers)

    def unit(self, length: int) -> int:
        """Elements of a unit, of a tensor of ``length`` elements; the last ones may be short."""
        return -(-length // self.units)

    def sent(self, sender: int, length: int) -> tuple[int, int]:
        """The range that a sender sends."""
        return self._range(sender, self.senders, length)

    def received(self, receiver: int, length: int) -> tuple[int, int]:
        """The range that a receiver is sent."""
        return self._range(receiver, self.receivers, length)

    def _range(self, index: int, count: int, length: int) -> tuple[int, int]:
        share = self.units // count * self.unit(length)
        return min(index * share, length), min((index + 1) * share, length)

    def parts(self, length: int) -> Iterator[Part]:
        """What travels, in the order in which both ends of every link have it."""
        for sender, receiver in self.links():
            start, stop = self.sent(sender, length)
            low, high = self.received(receiver, length)
            if max(start, low) < min(stop, high):
                yield Part(sender, receiver, max(start, low), min(stop, high))

    def links(self) -> Iterator[tuple[int, int]]:
        """(sender, receiver) of all that may have a part, whatever the length."""
        for sender in range(self.senders):
            first = sender * self.receivers // self.senders
            last = -(-(sender + 1) * self.receivers // self.senders)
            for receiver in range(first, last):
                yield sender, receiver

    def metadata_sender(self, receiver: int) -> int:
        """The sender of a receiver's first part; it also says what is coming."""
        return receiver * self.senders // self.receivers
