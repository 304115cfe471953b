"""The store in which processes find one another: its keys travel as calls of Ray's actors.

torch's TCPStore listens, and asks nobody who they are: whoever reaches its port can join a run, or
write what its processes read. A secret in the names of keys does not help, as it would be sent in
the clear, and the store can be told to wait, to count and to close without one. Calls of actors are
Ray's, with its authentication and encryption, and there is no port beside Ray's own.

Every process has its own copy of what concerns it. Who sets a key tells the first member of the
group that is being made, who tells all others; so nobody asks, nobody polls, and a process that
waits for a key needs no thread of another one. Processes know the actors that they tell only while
they make groups: the handles would keep actors alive that nobody refers to any more.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from raymm.kernels.collectives.waiting import waits_for_others

EVERYONE = 0
"""The number of the group of all processes."""


class News(NamedTuple):
    """A key that a process has set, while a group was made."""

    group: int
    setter: int
    key: str
    value: bytes


def peers(me: int, groups: Iterable[Sequence[int]]) -> set[int]:
    """Processes that one tells keys of groups that it is a member of: all others where it is the
    first member, else the first.

    Args:
        me: the process.
        groups: members of each.
    """
    receivers: set[int] = set()
    for members in groups:
        receivers.update(members if members[0] == me else members[:1])
    return receivers - {me}


class MeetingStore(Store):
    """One process's.

    Keys are set once, each by one process; nothing else is done with a store while groups are
    made (``TORCH_DIST_INIT_BARRIER``, which would have them counted, cannot be set).

    Args:
        me: the process's number.
        timeout: that any wait may take for which nobody says one.
        generation: how often processes have met before.
    """

    def __init__(self, me: int, timeout: timedelta, generation: int = 0) -> None:
        super().__init__()
        self._me, self._patience, self.generation = me, timeout, generation
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._group = EVERYONE
        self._members: dict[int, Sequence[int]] = {}
        self._actors: Mapping[int, Any] = {}
        self._news: list[News] = []  # for other members of groups that this is the first one of
        self._open = False

    @contextmanager
    def opened(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any]
    ) -> Iterator[None]:
        """Within, keys are told to others. What this process has, they have when it ends; and once
        its groups have been used, all of their members have had what they waited for.

        Args:
            members: of the groups that the process will make, by number.
            actors: of its :func:`peers` in these, by number.
        """
        with self._changed:
            self._members, self._actors, self._open = dict(members), actors, True
        sender = threading.Thread(target=self._send_news, name="meeting", daemon=True)
        sender.start()
        try:
            yield
        finally:
            with self._changed:
                self._open = False
                self._changed.notify_all()
            sender.join()
            self._actors = {}

    @contextmanager
    def making(self, group: int) -> Iterator[None]:
        """Within, keys that are set concern this group."""
        self._group = group
        try:
            yield
        finally:
            self._group = EVERYONE

    def receive_news(self, news: Sequence[News]) -> None:
        """What other processes have set. In any thread, also before this process makes groups."""
        with self._changed:
            self._values.update({each.key: each.value for each in news})
            # Those that are not its own to pass on have gone to all who need them.
            self._news += [each for each in news if each.group not in self._members or (
                self._passes_on(each)
            )]
            self._changed.notify_all()

    def _passes_on(self, news: News) -> bool:
        members = self._members[news.group]
        return members[0] == self._me and any(m not in (self._me, news.setter) for m in members)

    def _send_news(self) -> None:
        """Pass on what there is, all of it in one call to each; while that goes on, more comes."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or self._sendable())
                if not (news := self._sendable()):
                    return
                self._news = [each for each in self._news if each.group not in self._members]
            for group in {each.group for each in news}:
                for member in self._members[group][1:]:
                    of_others = [e for e in news if e.group == group and e.setter != member]
                    if of_others:
                        self._tell(member, of_others)

    def _tell(self, member: int, news: Sequence[News]) -> None:
        self._actors[member].receive_news.remote(news, self.generation)

    def _sendable(self) -> list[News]:
        return [
            each for each in self._news if each.group in self._members and self._passes_on(each)
        ]

    # What torch calls.

    def set(self, key: str, value: bytes | str) -> None:
        """Set a key here, and have the group's other members told."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        news = News(self._group, self._me, key, value)
        with self._changed:
            self._values[key] = value
            first = self._members[news.group][0] if self._open else self._me
            if self._open and first == self._me:
                self._news.append(news)
            self._changed.notify_all()
        if first != self._me:
            self._tell(first, [news])

    def get(self, key: str) -> bytes:
        """A key's value, once it is there."""
        self.wait([key])
        return self._values[key]

    @waits_for_others
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all keys are there.

        Raises:
            DistStoreError: naming those that are not.
        """
        patience = self._patience if timeout is None else timeout
        with self._changed:
            there = self._changed.wait_for(lambda: self.check(keys), patience.total_seconds())
            if not there:
                missing = [key for key in keys if key not in self._values]
                raise DistStoreError(f"no process has set {', '.join(missing)}")

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Values of keys, once all are there."""
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        """Set keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        """Keys that this process knows."""
        return len(self._values)

    def has_extended_api(self) -> bool:
        """No: keys are not appended to."""
        return False

    def clone(self) -> MeetingStore:
        """Itself, which any thread can use."""
        return self
