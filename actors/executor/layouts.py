"""Layouts that both ends of an edge know, kept in agreement without messages."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Generic, NamedTuple, TypeVar

import torch

from raymm.actors.executor.step_meta import LayoutKey
from raymm.actors.modules.message import Message
from raymm.actors.modules.message_samples import USED
from raymm.errors import ChannelError
from raymm.kernels.host_copies import on_host


class Layout(NamedTuple):
    """Shapes and dtypes of a message: ``tensors``, optionally with ``names``, and named ``side``
    entries."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    side: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Layout:
        tensors = tuple([(t.shape, t.dtype) for t in message.tensors])
        if not message.side:
            return cls(tensors, (), message.names)
        side = tuple([(n, t.shape, t.dtype) for n, t in message.side.items()])
        return cls(tensors, side, message.names)

    def is_of(self, message: Message) -> bool:
        """Return True if a message has this layout. Faster than creating the message's own
        layout."""
        if len(message.tensors) != len(self.tensors) or message.names != self.names:
            return False
        for tensor, (shape, dtype) in zip(message.tensors, self.tensors, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                return False
        return not (message.side or self.side) or self == Layout.of(message)

    def of_gradients(self) -> Layout:
        """Return the layout of the tensors' gradients. Named tensors have an additional byte each
        (:func:`raymm.actors.modules.message_samples.used_tensors`)."""
        count = len(self.names)
        return Layout(self.tensors, ((USED, (count,), torch.uint8),) if count else ())

    @property
    def side_bytes(self) -> int:
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.side)

    def encode(self) -> bytes:
        tensors = [(shape, str(dtype)) for shape, dtype in self.tensors]
        side = [(name, shape, str(dtype)) for name, shape, dtype in self.side]
        return json.dumps([tensors, side, self.names]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Invert :meth:`encode`. Raise a ``ChannelError`` if the data name an unknown dtype."""
        tensors, side, names = json.loads(data)
        return cls(
            tuple((tuple(shape), _dtype(dtype)) for shape, dtype in tensors),
            tuple((name, tuple(shape), _dtype(dtype)) for name, shape, dtype in side),
            tuple(names),
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"a message has the unknown dtype {name!r}")
    return dtype


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * prod(shape)


def pack(side: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all side entries as one byte tensor in host memory."""
    entries = (on_host(entry.detach()) for entry in side.values())
    return torch.cat([entry.contiguous().view(-1).view(torch.uint8) for entry in entries])


def unpack(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Invert :func:`pack`."""
    side, offset = {}, 0
    for name, shape, dtype in layout.side:
        size = _nbytes(shape, dtype)
        # clone: a view at an odd byte offset is not aligned for its dtype.
        side[name] = buffer[offset : offset + size].clone().view(dtype).view(shape)
        offset += size
    return side


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
