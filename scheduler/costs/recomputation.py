"""Exact choice of the activations to keep: the least added time within the memory of a stage.

Every layer has options: keep everything, keep some outputs and recompute the rest, keep only the
input, or offload activations. Each option adds time to the backward of a microbatch and holds bytes
while the microbatch is in flight. Choosing one option per layer is a multiple-choice knapsack
(OmniBal §4.3 chooses whole layers).
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
"""Activation handling of a layer: keep all; keep the outputs of matrix products and attention and
recompute the rest; keep only those of attention; recompute all from the input; or offload to host
memory until the backward."""
REMADE = (MATMULS, ATTENTION, ALL)
"""Options that run the forward again, in part or completely."""
# Relative to the largest sum of added seconds.
_ROUNDING = 1e-12


class LayerOption(NamedTuple):
    """One way to run a layer.

    Attributes:
        seconds: time added to the backward of each microbatch.
        nbytes: activations held per microbatch in flight.
        working_bytes: peak of temporary memory beyond what this and earlier layers keep, including
            recomputed or fetched activations; None if not measured.
    """

    name: str
    seconds: float
    nbytes: int
    working_bytes: int | None = None


class LayerBytes(NamedTuple):
    """Memory of a layer on one process; fields as in a layer's cost, options without time."""

    activation_bytes: int
    working_bytes: int
    forward_bytes: int
    options: tuple[LayerOption, ...] = ()

    @classmethod
    def from_list(cls, data: Any) -> LayerBytes:
        """Return the sizes from their JSON list; raise ``TypeError`` for a value of the wrong
        type."""
        if len(data) != 4:
            raise TypeError(f"halved is {data!r}; it must be three sizes in bytes, and options")
        saved, working, forward, rows = data
        options = tuple(LayerOption(*option) for option in rows)
        numbers = [saved, working, forward]
        numbers += [size for option in options for size in option[2:] if size is not None]
        if any(type(size) is not int or size < 0 for size in numbers):
            raise TypeError(f"halved is {data!r}; it must be three sizes in bytes, and options")
        return cls(saved, working, forward, options)


@dataclass(frozen=True)
class Recomputation:
    """Chosen option of every layer of a stage, with the total seconds added to a microbatch and the
    total bytes held per microbatch in flight."""

    names: tuple[str, ...]
    seconds: float
    nbytes: int


class _State(NamedTuple):
    """Choice for the first layers that no other choice beats in both bytes and seconds."""

    nbytes: int
    seconds: float
    option: int
    before: _State | None


def choose_options(layers: Sequence[Sequence[LayerOption]], limit: int) -> Recomputation:
    """Return the options that add the least time within ``limit`` bytes per microbatch; among equal
    ones, those with fewer bytes. Raise ``InputError`` if the smallest options need more.

    This is dynamic programming over the Pareto front of (bytes, seconds) of the first layers.
    States are dropped if they cannot beat the best known choice even in the linear relaxation of
    the remaining layers.
    """
    options = [_undominated(choices) for choices in layers]
    least = sum(choices[0][1].nbytes for choices in options)
    if least > limit:
        raise InputError(
            f"limit is {limit:,} bytes of activations; even the most frugal choice needs "
            f"{least:,}"
        )
    rests = _relaxations(options)
    # Float sums are inexact; the margin keeps the best known choice.
    best = rests[0].rounded(limit) + _ROUNDING * rests[0].slowest
    states = [_State(0, 0.0, -1, None)]
    for index, choices in enumerate(options):
        relaxation = rests[index + 1]
        grown = sorted(
            _State(state.nbytes + option.nbytes, state.seconds + option.seconds, number, state)
            for state in states
            for number, option in choices
            if state.nbytes + option.nbytes + relaxation.least <= limit
        )
        states, fastest = [], float("inf")
        for state in grown:
            bound = state.seconds + relaxation.seconds(limit - state.nbytes)
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
    """Return the bytes that the backward needs beyond ``option.nbytes``; ``kept`` is the size of
    all activations. Offloaded activations are fetched one layer ahead, so two layers count."""
    return (2 if option.name == OFFLOAD else 1) * (kept - option.nbytes)


def working_excess(layers: Sequence[tuple[int, int]]) -> int:
    """Return the peak of temporary bytes of a stage beyond what it keeps of a microbatch. While a
    layer works in the backward, the activations of later layers are already freed. ``layers`` has
    (kept bytes, temporary bytes beyond what this and earlier layers keep) of each layer."""
    later_bytes = most = 0
    for saved, working in reversed(layers):
        most = max(most, working - later_bytes)
        later_bytes += saved
    return most


def least_seconds(layers: Sequence[Sequence[LayerOption]], limit: int) -> float:
    """Return a lower bound of the seconds that :func:`choose_options` adds, from the linear
    relaxation; ``inf`` if the smallest options need more than ``limit``."""
    relaxed = _relaxations([_undominated(choices) for choices in layers])[0]
    return relaxed.seconds(limit) if relaxed.least <= limit else float("inf")


@lru_cache(maxsize=4096)  # most layers are equal
def saving_steps(options: tuple[LayerOption, ...]) -> tuple[LayerOption, list[tuple[float, int]]]:
    """Return the smallest option, and the savings of keeping more in the linear relaxation:
    (seconds per byte, bytes), best first."""
    hull = _hull([option for _, option in _undominated(options)])
    return hull[0], [
        (_saving(small, large), large.nbytes - small.nbytes)
        for small, large in zip(hull, hull[1:], strict=False)
    ]


def savings(layers: Sequence[Sequence[LayerOption]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the trade-off between kept bytes and added seconds in the linear relaxation: two
    arrays of equal length, at least 1. Bytes ascend; interpolate linearly between the points."""
    smallest = [saving_steps(tuple(options)) for options in layers]
    steps = sorted(
        (step for _, layer_steps in smallest for step in layer_steps), key=lambda step: -step[0]
    )
    sizes = [size for _, size in steps]
    saved = [rate * size for rate, size in steps]
    return (
        np.array(list(accumulate(sizes, initial=sum(o.nbytes for o, _ in smallest))), float),
        np.array(list(accumulate(
            (-s for s in saved), initial=sum(o.seconds for o, _ in smallest)
        )), float).clip(0.0),
    )


def _undominated(options: Sequence[LayerOption]) -> list[tuple[int, LayerOption]]:
    """Return the Pareto-optimal options with their numbers, from the smallest to the fastest."""
    optimal: list[tuple[int, LayerOption]] = []
    for number, option in sorted(enumerate(options), key=lambda o: (o[1].nbytes, o[1].seconds)):
        if not optimal or option.seconds < optimal[-1][1].seconds:
            optimal.append((number, option))
    return optimal


class _Relaxation:
    """Linear relaxation of layers: the least added time within a number of bytes. ``least`` and
    ``slowest`` are bytes and seconds of the smallest options."""

    def __init__(self, least: int, slowest: float, steps: Sequence[tuple[float, int]]) -> None:
        """Start from the smallest options; ``steps`` are (seconds saved per byte, bytes), best
        first."""
        self.least, self.slowest, self._steps = least, slowest, steps
        self._bytes = list(accumulate((size for _, size in steps), initial=0))
        self._saved = list(accumulate((rate * size for rate, size in steps), initial=0.0))

    def seconds(self, nbytes: int) -> float:
        """Return a lower bound of the seconds for ``nbytes``, which must be at least
        :attr:`least`."""
        step = bisect_right(self._bytes, nbytes - self.least) - 1
        saved = self._saved[step]
        if step < len(self._steps):
            saved += self._steps[step][0] * (nbytes - self.least - self._bytes[step])
        return self.slowest - saved

    def rounded(self, nbytes: int) -> float:
        """Return the seconds of a feasible choice: whole steps, in order, as long as they fit. It
        is feasible because the steps of each layer are in order."""
        return self.slowest - self._saved[bisect_right(self._bytes, nbytes - self.least) - 1]


def _relaxations(options: Sequence[Sequence[tuple[int, LayerOption]]]) -> list[_Relaxation]:
    """Return the relaxation of the layers from each index on, and of no layers."""
    steps: list[tuple[float, int]] = []
    least, slowest = 0, 0.0
    relaxations = [_Relaxation(0, 0.0, ())]
    for choices in reversed(options):
        smallest, layer_steps = saving_steps(tuple(option for _, option in choices))
        least += smallest.nbytes
        slowest += smallest.seconds
        steps += layer_steps
        steps.sort(key=lambda step: -step[0])
        relaxations.append(_Relaxation(least, slowest, list(steps)))
    return relaxations[::-1]


def _hull(options: Sequence[LayerOption]) -> list[LayerOption]:
    """Return the lower convex hull of (bytes, seconds), from the smallest option on."""
    hull: list[LayerOption] = []
    for option in options:
        while len(hull) > 1 and _saving(hull[-2], hull[-1]) <= _saving(hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _saving(small: LayerOption, large: LayerOption) -> float:
    return (small.seconds - large.seconds) / (large.nbytes - small.nbytes)
