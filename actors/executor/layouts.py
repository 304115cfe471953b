"""The layouts that the two ends of an edge know of, and agree on without a word."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from raymm.actors.executor.layout_rules import LayoutRules
from raymm.actors.executor.message_layout import Layout

MOST_LAYOUTS = 1024
"""Layouts that each end of an edge remembers from step to step."""

Route = TypeVar("Route")


class Due(NamedTuple, Generic[Route]):
    """What is known of a message that is to come, or to be sent.

    Attributes:
        key: of the message.
        route: how it travels; None if it is to be described first.
        expected: the layout is no more than expected: a byte on the host says whether it is so.
    """

    key: object
    route: Route | None
    expected: bool = False


class Layouts(Generic[Route]):
    """How messages of an edge travel, by key; at most :data:`MOST_LAYOUTS` are remembered, and the
    one that was not used for longest is forgotten.

    What happens between two calls of :meth:`due` counts from the next one on, in the order of the
    messages: so both ends, one of which is ahead of the other, decide alike. What was described in
    a step holds for its later messages, too, which both ends come to after it.

    Args:
        route: makes what travels of a layout.
    """

    def __init__(self, route: Callable[[Layout], Route]) -> None:
        self._route = route
        self._of: OrderedDict[object, tuple[Layout, Route]] = OrderedDict()
        self._rules = LayoutRules()
        self._keys: list[object] = []  # of the step's messages
        self._described: dict[object, tuple[Layout, Route]] = {}
        self._expected: dict[object, tuple[Layout, Route]] = {}
        self._confirmed: set[object] = set()

    def __len__(self) -> int:
        return len(self._of)

    def due(self, keys: Sequence[object]) -> deque[Due[Route]]:
        """The messages of the next step.

        Args:
            keys: in order.
        """
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
        """How a message travels that is like an earlier one of this step; None if there was none.

        Args:
            key: of the message.
        """
        described = self._described.get(key)
        return None if described is None else described[1]

    def describe(self, key: object, layout: Layout) -> Route:
        """What a message is like whose layout was not known, or is not as expected.

        Args:
            key: of the message.
            layout: that it has.
        """
        described = self._described.get(key)
        if described is None or described[0] != layout:
            described = self._described[key] = layout, self._route(layout)
        return described[1]

    def confirm(self, key: object) -> None:
        """A message is as expected.

        Args:
            key: of the message.
        """
        self._confirmed.add(key)

    def certain(self, key: object) -> Layout | None:
        """The layout of messages that have been there; None if there were none.

        Args:
            key: of the messages.
        """
        entry = self._described.get(key) or self._of.get(key)
        if entry is None and key in self._confirmed:
            entry = self._expected[key]
        return None if entry is None else entry[0]
