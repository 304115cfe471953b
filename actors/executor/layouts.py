"""Layouts that both ends of an edge know, kept in agreement without messages."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from raymm.actors.executor.layout_rules import LayoutRules
from raymm.actors.executor.message_layout import Layout

MOST_LAYOUTS = 1024
"""Number of layouts that each end of an edge remembers from step to step."""

Route = TypeVar("Route")


class Due(NamedTuple, Generic[Route]):
    """Message that is to be received or sent.

    Attributes:
        route: transfer plan of the message; None if a description has to be sent first.
        expected: True if the layout is a prediction, which a byte in host memory confirms or
            rejects.
    """

    key: object
    route: Route | None
    expected: bool = False


class Layouts(Generic[Route]):
    """Transfer plans for the messages of an edge, by key. At most :data:`MOST_LAYOUTS` are
    remembered; the least recently used one is evicted.

    Changes between two calls of :meth:`due` take effect at the next call, in the order of the
    messages, so both ends decide identically although one is ahead. A layout described in a step is
    also valid for later messages of that step.
    """

    def __init__(self, route: Callable[[Layout], Route]) -> None:
        self._route = route
        self._of: OrderedDict[object, tuple[Layout, Route]] = OrderedDict()
        self._rules = LayoutRules()
        self._keys: list[object] = []  # keys of the step's messages
        self._described: dict[object, tuple[Layout, Route]] = {}
        self._expected: dict[object, tuple[Layout, Route]] = {}
        self._confirmed: set[object] = set()

    def __len__(self) -> int:
        return len(self._of)

    def due(self, keys: Sequence[object]) -> deque[Due[Route]]:
        self._remember()
        self._keys = list(keys)
        due: deque[Due[Route]] = deque()
        for key in keys:
            if key in self._of:
                self._of.move_to_end(key)
                due.append(Due(key, self._of[key][1]))
                continue
            if key not in self._expected and (layout := self._rules.expect(key)) is not None:
                self._expected[key] = layout, self._route(layout)
            expected = self._expected.get(key)
            due.append(Due(key, None) if expected is None else Due(key, expected[1], True))
        return due

    def _remember(self) -> None:
        for key in dict.fromkeys(self._keys):
            if key in self._described:
                self._rules.learn(key, self._described[key][0])
                self._of[key] = self._described[key]
            elif key in self._expected:
                self._of[key] = self._expected[key]
        while len(self._of) > MOST_LAYOUTS:
            self._of.popitem(last=False)
        for noted in (self._described, self._expected, self._confirmed):
            noted.clear()

    def described(self, key: object) -> Route | None:
        """Return the transfer plan of a message whose key was described earlier in this step; None
        otherwise."""
        described = self._described.get(key)
        return None if described is None else described[1]

    def describe(self, key: object, layout: Layout) -> Route:
        """Record the layout of a message that was not predicted correctly; return its transfer
        plan."""
        described = self._described.get(key)
        if described is None or described[0] != layout:
            described = self._described[key] = layout, self._route(layout)
        return described[1]

    def confirm(self, key: object) -> None:
        self._confirmed.add(key)

    def certain(self, key: object) -> Layout | None:
        """Return the layout of earlier messages with a key; None if there were none."""
        entry = self._described.get(key) or self._of.get(key)
        if entry is None and key in self._confirmed:
            entry = self._expected[key]
        return None if entry is None else entry[0]
