"""Key-value store for the rendezvous of processes. Keys travel as calls of Ray actors.

Torch's TCPStore listens on a port without authentication: any client that reaches it can join a run
or overwrite values. A secret in the key names would not help, because keys travel in the clear and
some operations need no key. Actor calls have Ray's authentication and need no additional port.

Every process holds its own copy of the keys that concern it. A process that sets a key sends it to
the first member of the group that is being created, which sends it to all others. So no process
polls, and none needs another process's thread. Actor handles are held only while groups are
created, because a handle keeps an unused actor alive.
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
"""Number of the group of all processes."""


class News(NamedTuple):
    """A key that a process has set while a group was created."""

    group: int
    setter: int
    key: str
    value: bytes


def peers(me: int, groups: Iterable[Sequence[int]]) -> set[int]:
    """Return the receivers of a process's keys: all other members of the groups in which the
    process is the first member, and the first member of each other group."""
    receivers: set[int] = set()
    for members in groups:
        receivers.update(members if members[0] == me else members[:1])
    return receivers - {me}


class RendezvousStore(Store):
    """Store of one process; ``generation`` is the number of earlier rendezvous.

    Each key is set once, by one process. Torch uses no other operation while it creates groups;
    ``TORCH_DIST_INIT_BARRIER``, which would need counters, cannot be set.
    """

    def __init__(self, me: int, timeout: timedelta, generation: int = 0) -> None:
        super().__init__()
        self._me, self._patience, self.generation = me, timeout, generation
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._group = EVERYONE
        self._members: dict[int, Sequence[int]] = {}
        self._actors: Mapping[int, Any] = {}
        # for other members of groups in which this process is the first member
        self._news: list[News] = []
        self._open = False

    @contextmanager
    def opened(
        self, members: Mapping[int, Sequence[int]], actors: Mapping[int, Any]
    ) -> Iterator[None]:
        """Forward keys to other processes for the length of the block.

        At the end all keys of this process have been sent. All members of a group that has been
        used have received the keys that they waited for.
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
        """Associate the keys that are set in the block with a group."""
        self._group = group
        try:
            yield
        finally:
            self._group = EVERYONE

    def receive_news(self, news: Sequence[News]) -> None:
        """Store keys that other processes have set; callable from any thread, also before
        :meth:`opened`."""
        with self._changed:
            self._values.update({each.key: each.value for each in news})
            # The other keys have already reached every process that needs them.
            self._news += [each for each in news if each.group not in self._members or (
                self._passes_on(each)
            )]
            self._changed.notify_all()

    def _passes_on(self, news: News) -> bool:
        members = self._members[news.group]
        return members[0] == self._me and any(m not in (self._me, news.setter) for m in members)

    def _send_news(self) -> None:
        """Forward all new keys in one call per process; further keys arrive during the calls."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._open or self._sendable())
                if not (news := self._sendable()):
                    return
                self._news = [each for each in self._news if each.group not in self._members]
            for group in {each.group for each in news}:
                for member in self._members[group][1:]:
                    news_for_member = [e for e in news if e.group == group and e.setter != member]
                    if news_for_member:
                        self._tell(member, news_for_member)

    def _tell(self, member: int, news: Sequence[News]) -> None:
        self._actors[member].receive_news.remote(news, self.generation)

    def _sendable(self) -> list[News]:
        return [
            each for each in self._news if each.group in self._members and self._passes_on(each)
        ]

    # Interface that torch calls.

    def set(self, key: str, value: bytes | str) -> None:
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
        self.wait([key])
        return self._values[key]

    @waits_for_others
    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: a timeout; names the missing keys.
        """
        patience = self._patience if timeout is None else timeout
        with self._changed:
            all_set = self._changed.wait_for(lambda: self.check(keys), patience.total_seconds())
            if not all_set:
                missing = [key for key in keys if key not in self._values]
                raise DistStoreError(f"no process has set {', '.join(missing)}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.wait(keys)
        return [self._values[key] for key in keys]

    def multi_set(self, keys: list[str], values: list[bytes | str]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def num_keys(self) -> int:
        return len(self._values)

    def has_extended_api(self) -> bool:
        """Return False: append and queue operations are not supported."""
        return False

    def clone(self) -> RendezvousStore:
        return self
