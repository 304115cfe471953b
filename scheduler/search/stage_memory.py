"""Stages that fit in a device's memory, and the time that making them fit adds.

The weights and optimizer state of a stage leave some bytes for the activations of the microbatches
that 1F1B holds there, as many as the stage is deep. If that is not enough, its layers may keep less
and recompute the rest. The least time for that is a knapsack
(:mod:`raymm.scheduler.costs.recomputation`). Partitions have to consider it, because moving a layer
to a stage nearer to the loss, which holds fewer microbatches, may save more time than its compute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from raymm.scheduler.costs.layer_costs import LayerCost, working_bytes
from raymm.scheduler.costs.recomputation import (
    KEEP,
    LayerOption,
    Recomputation,
    choose_options,
    least_seconds,
    savings,
)
from raymm.scheduler.search.partition import Ranges, cost_matrix

# The exact answer of the knapsack is below the relaxation by rounding only.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class StageBytes:
    """Memory of a module's stages: layers [lo, hi) for all lo < hi, in arrays over (lo, hi).

    Attributes:
        room: bytes available for everything below: memory without weights, optimizer state,
            communicators, workspaces and fragmentation.
        update: temporary bytes at the end of a step.
        messages: bytes of messages in flight and data; without backward, also of the forward.
        received: bytes received per microbatch.
        saved: bytes kept per microbatch besides the layers' activations (the output).
        working: temporary bytes beyond what the stage keeps, if it keeps all activations.
    """

    room: np.ndarray
    update: np.ndarray
    messages: np.ndarray
    received: np.ndarray
    saved: np.ndarray
    working: np.ndarray


def range_maximum(values: Sequence[float]) -> np.ndarray:
    """Return an (n + 1, n + 1) array with the largest of ``values[lo:hi]`` at (lo, hi); 0 for an
    empty range. Values must be at least 0."""
    many = len(values)
    result = np.zeros((many + 1, many + 1))
    for lo in range(many):
        result[lo, lo + 1 :] = np.maximum.accumulate(np.array(values[lo:], dtype=float))
    return result


class ModuleMemory:
    """Possible stages of a module: layers [lo, hi) for all lo < hi, in arrays over (lo, hi).

    Args:
        backward: per layer, True if a step runs a backward of it.
        sizes: memory of stages besides the layers' activations.
        recomputing: True for stages that are recomputed as a whole.
        adaptive: True if layers may keep less where a stage would not fit.
    """

    def __init__(
        self, layers: Sequence[LayerCost], backward: Sequence[bool], sizes: StageBytes,
        recomputing: np.ndarray, adaptive: bool,
    ) -> None:
        self._layers, self._backward, self._sizes = layers, backward, sizes
        self._recomputing, self._adaptive = recomputing, adaptive
        self._room = np.where(sizes.update <= sizes.room, sizes.room - sizes.messages, -np.inf)
        self._kept = cost_matrix(
            [c.activation_bytes if b else 0 for c, b in zip(layers, backward, strict=True)]
        )
        self._added: dict[int, np.ndarray] = {}
        self._whole: dict[int, np.ndarray] = {}
        self._bounds = np.empty((0, 0, 0))
        self._chosen: dict[tuple[int, int, int], Recomputation | None] = {}
        kinds: dict[tuple[LayerCost, bool], int] = {}
        self._kinds = tuple(
            kinds.setdefault(layer, len(kinds)) for layer in zip(layers, backward, strict=True)
        )
        self._choices: dict[tuple[int, float, float, tuple[int, ...]], Recomputation | None] = {}
        self._frontiers: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}

    def added(self, live: int) -> np.ndarray:
        """Return the (n + 1, n + 1) seconds per microbatch that memory adds to stages that hold the
        activations of ``live`` microbatches; ``inf`` for stages that cannot fit. If layers have to
        keep less, an entry is a lower bound until :meth:`refine` is called for its stage."""
        if live not in self._added:
            again, sizes = self._recomputing, self._sizes
            kept = self._kept + sizes.saved
            needed = np.where(again, live * sizes.received + kept, live * kept) + sizes.working
            self._whole[live] = needed <= self._room
            added = np.where(self._whole[live], 0.0, np.inf)
            if self._adaptive:
                open_to_less = np.isinf(added) & ~again
                added[open_to_less] = self._relaxed(live)[open_to_less]
            self._added[live] = added
        return self._added[live]

    def refine(self, live: int, lo: int, hi: int) -> bool:
        """Make the entry of :meth:`added` for layers [lo, hi) exact; return True if that changed
        it."""
        bound = self.added(live)[lo, hi]
        if self._whole[live][lo, hi] or bound == np.inf:
            return False
        chosen = self.choice(live, lo, hi)
        exact = np.inf if chosen is None else chosen.seconds
        self._added[live][lo, hi] = exact
        return exact > bound * (1 + _ROUNDING)

    def choice(self, live: int, lo: int, hi: int) -> Recomputation | None:
        """Return what the layers [lo, hi) keep so that the stage fits; None if it fits as it is, or
        cannot fit."""
        key = live, lo, hi
        if key not in self._chosen:
            fits = self.added(live)[lo, hi] == np.inf or self._whole[live][lo, hi]
            self._chosen[key] = None if fits else self._alike(live, lo, hi)
        return self._chosen[key]

    def _alike(self, live: int, lo: int, hi: int) -> Recomputation | None:
        """Return :meth:`_choose`, computed once for stages of equal layers."""
        key = live, self._room[lo, hi], self._sizes.saved[lo, hi], self._kinds[lo:hi]
        if key not in self._choices:
            self._choices[key] = self._choose(live, lo, hi)
        return self._choices[key]

    def _choose(self, live: int, lo: int, hi: int) -> Recomputation | None:
        own = list(zip(self._layers[lo:hi], self._backward[lo:hi], strict=True))
        layers = [cost.choices if b else _NOTHING for cost, b in own]
        # A layer also needs temporary memory, in addition to the activations of all layers. The
        # amount depends on the choice of options, so search for the best limit of it.
        rooms = sorted({working_bytes(cost, o) for cost, b in own if b for o in cost.choices})
        tries = []
        for room in rooms:
            # Bytes for a microbatch's activations.
            budget = int((self._room[lo, hi] - room) // live - self._sizes.saved[lo, hi])
            allowed = [
                [
                    option for option in choices
                    if not b or working_bytes(c, option) <= room
                ]
                for choices, (c, b) in zip(layers, own, strict=True)
            ]
            if not all(allowed):
                continue
            tries.append((least_seconds(allowed, budget), budget, allowed))
        best: Recomputation | None = None
        for bound, budget, allowed in sorted(tries, key=lambda option: option[:2]):
            if bound == np.inf or best is not None and bound >= best.seconds:
                break
            chosen = choose_options(allowed, budget)
            if best is None or chosen.seconds < best.seconds:
                best = chosen
        return best

    def _relaxed(self, live: int) -> np.ndarray:
        """Return lower bounds where a stage would not fit, from the linear relaxation and without
        temporary memory for recomputation."""
        if live > len(self._bounds):
            lives = np.arange(1, max(2 * live, 16) + 1)
            layers = len(self._layers)
            self._bounds = np.full((len(lives), layers + 1, layers + 1), np.inf)
            alike: dict[tuple[float, float, int], np.ndarray] = {}
            for lo, hi in combinations(range(layers + 1), 2):
                frontier, room = self._frontier(lo, hi), self._room[lo, hi]
                saved = self._sizes.saved[lo, hi]
                key = room, saved, id(frontier)
                if key not in alike:
                    budgets = room / lives - saved
                    alike[key] = np.where(
                        budgets >= frontier[0][0], np.interp(budgets, *frontier), np.inf
                    )
                self._bounds[:, lo, hi] = alike[key]
        return self._bounds[live - 1]

    def _frontier(self, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes per microbatch, ascending, and the least seconds added with them; linear in
        between."""
        kinds = tuple(sorted(self._kinds[lo:hi]))
        if kinds not in self._frontiers:
            own = zip(self._layers[lo:hi], self._backward[lo:hi], strict=True)
            self._frontiers[kinds] = savings([cost.choices for cost, b in own if b])
        return self._frontiers[kinds]


_NOTHING = (LayerOption(KEEP, 0.0, 0),)


class StageMemory:
    """Memory model of a :class:`~raymm.scheduler.search.stage_space.StageSpace`. ``microbatches``
    are per step and replica, by module; if ``adaptive``, layers may keep less where a stage would
    not fit. ``beyond`` is the number of stages on the longest path from a module's output to the
    loss."""

    def __init__(
        self, modules: Mapping[str, ModuleMemory], microbatches: Mapping[str, int],
        adaptive: bool = False,
    ) -> None:
        self._modules, self._microbatches = modules, microbatches
        self.adaptive = adaptive

    def added(self, module: str, stages: int, beyond: int) -> np.ndarray:
        """Return (stages, n + 1, n + 1) seconds per microbatch, see :meth:`ModuleMemory.added`."""
        memory = self._modules[module]
        return np.stack([memory.added(live) for live in self._live(module, stages, beyond)])

    def refine(self, module: str, ranges: Ranges, beyond: int) -> bool:
        """Make the entries of the stages with these ``[lo, hi)`` ranges exact; return True if that
        changed any."""
        lives = self._live(module, len(ranges), beyond)
        changed = [
            self._modules[module].refine(live, lo, hi)
            for live, (lo, hi) in zip(lives, ranges, strict=True)
        ]
        return any(changed)

    def options(self, module: str, ranges: Ranges, beyond: int) -> list[tuple[str, ...]]:
        """Return the activation handling of the layers of each ``[lo, hi)`` range; empty if they
        keep all."""
        memory, result = self._modules[module], []
        for live, (lo, hi) in zip(self._live(module, len(ranges), beyond), ranges, strict=True):
            chosen = memory.choice(live, lo, hi)
            result.append(() if chosen is None else chosen.names)
        return result

    def _live(self, module: str, stages: int, beyond: int) -> list[int]:
        """Return the number of microbatches that 1F1B holds in each stage."""
        most = self._microbatches[module]
        return [min(stages - index + beyond, most) for index in range(stages)]
