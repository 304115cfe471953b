"""Rules that predict a message's layout from the sizes of a microbatch's data, learned from
messages.

With text of varying length, nearly every microbatch has a new shape. Its layouts equal earlier ones
except for some dimensions. Each of these is linear in one of the data's sizes, divided by a stride
or by the number of processes that share the data, and rounded down. Both ends of an edge learn from
the same messages in the same order, so both predict the same layout. A wrong prediction costs an
additional transfer and is always detected (:mod:`raymm.actors.executor.send_channel`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from raymm.actors.executor.message_layout import Layout
from raymm.actors.executor.step_meta import LayoutKey

MOST_RULES = 64
"""Number of microbatch structures with a rule; the least recently used rule is evicted."""
MOST_LESSONS = 32
"""Number of layouts that a rule is checked against."""
LARGEST_DIVISOR = 8

Lesson = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes of a microbatch's data, and all dimensions of the message's layout."""


class _Linear(NamedTuple):
    """``slope * ((sizes[index] + shift) // divisor) + offset``."""

    index: int
    divisor: int
    shift: int
    slope: int
    offset: int

    def of(self, sizes: Sequence[int]) -> int:
        return self.slope * ((sizes[self.index] + self.shift) // self.divisor) + self.offset


class _Rule:
    """Layouts of one microbatch structure. They differ in their dimensions only."""

    def __init__(self, sizes: tuple[int, ...], layout: Layout) -> None:
        self._form = _form(layout)
        self._like = layout
        self._lessons: list[Lesson] = []
        # candidate rules; empty for a constant dimension
        self._dimensions: list[list[_Linear]] = []
        self.broken = False
        self.learn(sizes, layout)

    def learn(self, sizes: tuple[int, ...], layout: Layout) -> None:
        """Add a layout and drop the candidates that it contradicts."""
        dimensions = _dimensions(layout)
        if _form(layout) != self._form or len(self._lessons) == MOST_LESSONS:
            self.broken = True
            return
        if self._lessons and len(sizes) != len(self._lessons[0][0]):
            self.broken = True
            return
        first = self._lessons[0] if self._lessons else (sizes, dimensions)
        self._lessons.append((sizes, dimensions))
        self._dimensions = self._dimensions or [[] for _ in dimensions]
        for number, value in enumerate(dimensions):
            values = [lesson[1][number] for lesson in self._lessons]
            if all(v == values[0] for v in values):
                continue
            if not self._dimensions[number]:
                self._dimensions[number] = _lines(first[0], first[1][number], sizes, value)
            self._dimensions[number] = [
                line for line in self._dimensions[number]
                if all(line.of(s) == v for (s, _), v in zip(self._lessons, values, strict=True))
            ]
            self.broken |= not self._dimensions[number]

    def expect(self, sizes: tuple[int, ...]) -> Layout | None:
        if self.broken or len(sizes) != len(self._lessons[0][0]):
            return None
        dimensions = [
            lines[0].of(sizes) if lines else value
            for lines, value in zip(self._dimensions, self._lessons[0][1], strict=True)
        ]
        if any(value < 0 for value in dimensions):
            return None
        ready = iter(dimensions)
        return Layout(
            tuple((tuple(next(ready) for _ in s), dtype) for s, dtype in self._like.tensors),
            tuple((n, tuple(next(ready) for _ in s), dtype) for n, s, dtype in self._like.side),
            self._like.names,
        )


class LayoutRules:
    """Predictions of layouts for message keys without a known layout."""

    def __init__(self) -> None:
        self._rules: OrderedDict[int, _Rule] = OrderedDict()

    def learn(self, key: object, layout: Layout) -> None:
        """Learn from a layout that was not predicted. Keys other than :class:`LayoutKey` are
        ignored."""
        if not isinstance(key, LayoutKey):
            return
        rule = self._rules.get(key.structure)
        if rule is None:
            self._rules[key.structure] = _Rule(key.sizes, layout)
        elif not rule.broken:
            rule.learn(key.sizes, layout)
        self._rules.move_to_end(key.structure)
        if len(self._rules) > MOST_RULES:
            self._rules.popitem(last=False)

    def expect(self, key: object) -> Layout | None:
        """Predict the layout of a message; None if no rule applies."""
        rule = self._rules.get(key.structure) if isinstance(key, LayoutKey) else None
        return None if rule is None else rule.expect(key.sizes)  # type: ignore[union-attr]


def _form(layout: Layout) -> tuple[object, ...]:
    """Return a layout without its dimensions."""
    tensors = tuple((len(shape), dtype) for shape, dtype in layout.tensors)
    side = tuple((name, len(shape), dtype) for name, shape, dtype in layout.side)
    return tensors, side, layout.names


def _dimensions(layout: Layout) -> tuple[int, ...]:
    shapes = [shape for shape, _ in layout.tensors] + [shape for _, shape, _ in layout.side]
    return tuple(size for shape in shapes for size in shape)


def _lines(
    sizes: Sequence[int], value: int, other: Sequence[int], other_value: int
) -> list[_Linear]:
    """Return the linear rules through two lessons with different values, the simplest first."""
    lines = []
    for divisor in range(1, LARGEST_DIVISOR + 1):
        for shift in range(divisor):
            for index, (size, other_size) in enumerate(zip(sizes, other, strict=True)):
                x, y = (size + shift) // divisor, (other_size + shift) // divisor
                if x != y and (other_value - value) % (y - x) == 0:
                    slope = (other_value - value) // (y - x)
                    lines.append(_Linear(index, divisor, shift, slope, value - slope * x))
    return lines
