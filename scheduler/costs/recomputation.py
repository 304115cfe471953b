"""Which activations to keep: the least added time within a stage's memory, exactly.

Every layer has options: keep everything, keep some outputs and make the rest again, keep its
input only, or keep activations elsewhere. Each adds time to a microbatch's backward and leaves
bytes held while the microbatch is under way. Choosing one per layer is a knapsack with
multiple choices (OmniBal §4.3 chooses whole layers).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from raymm.errors import InputError

KEEP, MATMULS, ATTENTION, ALL, OFFLOAD = OPTIONS = (
    "keep", "matmuls", "attention", "all", "offload"
)
"""What a layer may do with its activations: keep them; keep outputs of matrix products and of
attention, and make the rest again; of attention only; make all again from its input; or keep them
in the host's memory until the backward pass."""
REMADE = (MATMULS, ATTENTION, ALL)
"""Those that run a layer's forward again, in parts or whole."""
# Relative to all seconds that may be added.
_ROUNDING = 1e-12


class LayerOption(NamedTuple):
    """One way to run a layer.

    Attributes:
        name: what the actors know it by, e.g. ``"keep"``, ``"matmuls"``, ``"all"``.
        seconds: added to each microbatch's backward.
        nbytes: activations held per microbatch under way.
        working_bytes: the most that the layer has for a time beyond what it and the layers before
            it keep, then: also what it makes again, or fetches; None if that was not measured.
    """

    name: str
    seconds: float
    nbytes: int
    working_bytes: int | None = None


class LayerBytes(NamedTuple):
    """What a process has of a layer; fields as of a layer's cost, options without time."""

    activation_bytes: int
    working_bytes: int
    forward_bytes: int
    options: tuple[LayerOption, ...] = ()

    @classmethod
    def from_list(cls, data: Any) -> LayerBytes:
        """Inverse of what JSON makes of it.

        Raises:
            TypeError: on a value of the wrong kind.
        """
        if len(data) != 4:
            raise TypeError(f"halved is {data!r}; it must be three sizes in bytes, and options")
        kept, working, forward, more = data
        options = tuple(LayerOption(*option) for option in more)
        numbers = [kept, working, forward]
        numbers += [size for option in options for size in option[2:] if size is not None]
        if any(type(size) is not int or size < 0 for size in numbers):
            raise TypeError(f"halved is {data!r}; it must be three sizes in bytes, and options")
        return cls(kept, working, forward, options)


@dataclass(frozen=True)
class Recomputation:
    """A choice for every layer of a stage.

    Attributes:
        names: the options' names, layer by layer.
        seconds: what they add to a microbatch.
        nbytes: what they hold per microbatch under way.
    """

    names: tuple[str, ...]
    seconds: float
    nbytes: int


class _State(NamedTuple):
    """A choice for the first layers that no other beats in both bytes and seconds."""

    nbytes: int
    seconds: float
    option: int
    before: _State | None


def choose_options(layers: Sequence[Sequence[LayerOption]], limit: int) -> Recomputation:
    """The options that add least time within ``limit`` bytes; of equal ones, a frugal one.

    Dynamic programming over the undominated (bytes, seconds) of the first layers. What cannot
    beat the best choice known, even if the layers that follow were divisible (the linear
    relaxation), is dropped.

    Args:
        layers: options of each layer; at least one each.
        limit: bytes that a microbatch's activations may take.

    Raises:
        InputError: if the smallest options need more.
    """
    options = [_undominated(choices) for choices in layers]
    least = sum(choices[0][1].nbytes for choices in options)
    if least > limit:
        raise InputError(
            f"limit is {limit:,} bytes of activations; even the most frugal choice needs "
            f"{least:,}"
        )
    rests = _relaxations(options)
    # Sums of floats are not exact, and the best known must stay.
    best = rests[0].rounded(limit) + _ROUNDING * rests[0].slowest
    states = [_State(0, 0.0, -1, None)]
    for index, choices in enumerate(options):
        rest = rests[index + 1]
        grown = sorted(
            _State(state.nbytes + option.nbytes, state.seconds + option.seconds, number, state)
            for state in states
            for number, option in choices
            if state.nbytes + option.nbytes + rest.least <= limit
        )
        states, fastest = [], float("inf")
        for state in grown:
            bound = state.seconds + rest.seconds(limit - state.nbytes)
            if state.seconds < fastest and bound <= best:
                states.append(state)
                fastest = state.seconds
    last = min(states, key=lambda state: (state.seconds, state.nbytes))
    names = []
    state: _State | None = last
    for choices in reversed(layers):
        assert state is not None  # a state per layer
        names.append(choices[state.option].name)
        state = state.before
    return Recomputation(tuple(reversed(names)), last.seconds, last.nbytes)


def remade_bytes(option: LayerOption, kept: int) -> int:
    """Bytes beyond what a layer holds that its backward needs, of ``kept`` if all were kept. What
    is offloaded is fetched while the backward of the layer after it runs."""
    return (2 if option.name == OFFLOAD else 1) * (kept - option.nbytes)


def working_excess(layers: Sequence[tuple[int, int]]) -> int:
    """Bytes that a stage has for a time beyond what it keeps of a microbatch, at most. While a
    layer works, nothing is left of those after it.

    Args:
        layers: per layer what it keeps, and what it has for a time beyond what it and those before
            it keep.
    """
    after = most = 0
    for kept, working in reversed(layers):
        most = max(most, working - after)
        after += kept
    return most


def least_seconds(layers: Sequence[Sequence[LayerOption]], limit: int) -> float:
    """A lower bound of what :func:`choose_options` adds, for arguments as of it: layers may be
    divided. ``inf`` if the smallest options need more."""
    relaxed = _relaxations([_undominated(choices) for choices in layers])[0]
    return relaxed.seconds(limit) if relaxed.least <= limit else float("inf")


@lru_cache(maxsize=4096)  # layers are mostly alike
def saving_steps(options: tuple[LayerOption, ...]) -> tuple[LayerOption, list[tuple[float, int]]]:
    """The option that keeps least, and what keeping more saves if a layer may be divided:
    (seconds per byte, bytes), best first."""
    hull = _hull([option for _, option in _undominated(options)])
    return hull[0], [
        (_saving(small, large), large.nbytes - small.nbytes)
        for small, large in zip(hull, hull[1:], strict=False)
    ]


def savings(layers: Sequence[Sequence[LayerOption]]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that layers may keep together, ascending, and the least seconds added with them, if
    layers may be divided: linear in between. Two arrays of the same length, at least 1.

    Args:
        layers: the options of each.
    """
    smallest = [saving_steps(tuple(options)) for options in layers]
    steps = sorted((step for _, own in smallest for step in own), key=lambda step: -step[0])
    sizes = [size for _, size in steps]
    saved = [rate * size for rate, size in steps]
    return (
        np.array(list(accumulate(sizes, initial=sum(o.nbytes for o, _ in smallest))), float),
        np.array(list(accumulate(
            (-s for s in saved), initial=sum(o.seconds for o, _ in smallest)
        )), float).clip(0.0),
    )


def _undominated(options: Sequence[LayerOption]) -> list[tuple[int, LayerOption]]:
    """Options, with their numbers, from the smallest to the fastest; none is worse than another
    in both."""
    kept: list[tuple[int, LayerOption]] = []
    for number, option in sorted(enumerate(options), key=lambda o: (o[1].nbytes, o[1].seconds)):
        if not kept or option.seconds < kept[-1][1].seconds:
            kept.append((number, option))
    return kept


class _Relaxation:
    """Layers whose options may be mixed: how little time they add within some bytes.

    Attributes:
        least: bytes of the smallest options.
        slowest: seconds of those.
    """

    def __init__(self, least: int, slowest: float, steps: Sequence[tuple[float, int]]) -> None:
        """``steps``: (seconds saved per byte, bytes), best first, from the smallest options."""
        self.least, self.slowest, self._steps = least, slowest, steps
        self._bytes = list(accumulate((size for _, size in steps), initial=0))
        self._saved = list(accumulate((rate * size for rate, size in steps), initial=0.0))

    def seconds(self, nbytes: int) -> float:
        """A lower bound for ``nbytes``, at least :attr:`least`."""
        at = bisect_right(self._bytes, nbytes - self.least) - 1
        saved = self._saved[at]
        if at < len(self._steps):
            saved += self._steps[at][0] * (nbytes - self.least - self._bytes[at])
        return self.slowest - saved

    def rounded(self, nbytes: int) -> float:
        """What whole steps, taken in order while they fit, come to: something that can be had,
        since the steps of one layer come in its order."""
        return self.slowest - self._saved[bisect_right(self._bytes, nbytes - self.least) - 1]


def _relaxations(options: Sequence[Sequence[tuple[int, LayerOption]]]) -> list[_Relaxation]:
    """Of the layers from each on, and of none."""
    steps: list[tuple[float, int]] = []
    least, slowest = 0, 0.0
    relaxations = [_Relaxation(0, 0.0, ())]
    for choices in reversed(options):
        smallest, own = saving_steps(tuple(option for _, option in choices))
        least += smallest.nbytes
        slowest += smallest.seconds
        steps += own
        steps.sort(key=lambda step: -step[0])
        relaxations.append(_Relaxation(least, slowest, list(steps)))
    return relaxations[::-1]


def _hull(options: Sequence[LayerOption]) -> list[LayerOption]:
    """The lower convex hull of (bytes, seconds), from the smallest option on."""
    hull: list[LayerOption] = []
    for option in options:
        while len(hull) > 1 and _saving(hull[-2], hull[-1]) <= _saving(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _saving(small: LayerOption, large: LayerOption) -> float:
    return (small.seconds - large.seconds) / (large.nbytes - small.nbytes)
