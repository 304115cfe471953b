"""Inputs and placements of a stage for compiled searches: arrays by module, and classes of GPUs
with the same modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from raymm.scheduler.costs.interference import Interference
from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import bits


class InterferenceLaw(NamedTuple):
    """Eq. 8 for compiled code.

    Attributes:
        constant, additive, product: e1, e2, e3, float64.
        own: True if e3 multiplies a module's bandwidth with the sum of the others, not the product.
        relative: True if a delay is a fraction of the module's seconds alone.
    """

    constant: float
    additive: float
    product: float
    own: bool
    relative: bool

    @classmethod
    def of(cls, model: Interference) -> InterferenceLaw:
        return cls(
            float(model.constant), float(model.additive), float(model.product),
            model.coupling == "own", model.unit == "relative",
        )


class Pool(NamedTuple):
    """GPUs that a stage's modules share; ``steps`` and ``memory`` (bytes) are per GPU."""

    gpus: int
    steps: int
    memory: int
    law: InterferenceLaw


class StageInputs(NamedTuple):
    """Input of a search for placements of a stage's K modules.

    Attributes:
        seconds: (K, J, steps + 1) seconds alone, by log2 of the degree and quota.
        memory: (K, J) int64, bytes on each GPU.
        bandwidth: (K, steps + 1) share of the bandwidth.
        entry: (K, J, steps + 1) lower bounds of seconds next to any other module.
    """

    seconds: np.ndarray
    memory: np.ndarray
    bandwidth: np.ndarray
    entry: np.ndarray
    pool: Pool


class Packed(NamedTuple):
    """Modules on GPUs; GPUs with the same modules are one class.

    Attributes:
        chosen: (K, 2) int64, degree and quota of each module; 0 for modules that are not placed.
        gpus: (C,) int64, number of GPUs of each class.
        content: (C,) int64, modules on them, as bits.
    """

    chosen: np.ndarray
    gpus: np.ndarray
    content: np.ndarray


@dataclass(frozen=True, eq=False)
class StagePacking:
    """Named modules on GPUs; ``packed`` has them in the order of ``modules``."""

    modules: tuple[str, ...]
    packed: Packed

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """Placements with numbered GPUs; classes with most modules come first."""
        sets: list[list[int]] = [[] for _ in self.modules]
        _, gpus, content = self.packed
        first = 0
        order = sorted(
            range(len(gpus)), key=lambda c: (-int(content[c]).bit_count(), c)
        )
        for c in order:
            for local in bits(int(content[c])):
                sets[local].extend(range(first, first + int(gpus[c])))
            first += int(gpus[c])
        return tuple(
            Placement(name, tuple(replica_gpus), int(quota))
            for name, replica_gpus, quota in zip(
                self.modules, sets, self.packed.chosen[:, 1], strict=True
            )
        )

    @classmethod
    def of(
        cls, modules: Sequence[str], placements: Sequence[Placement], gpus: int
    ) -> StagePacking:
        """Return the packing of placements, one of each module in ``modules``, on ``gpus`` GPUs
        including unused ones."""
        index = {name: i for i, name in enumerate(modules)}
        chosen = np.zeros((len(modules), 2), np.int64)
        content = [0] * gpus
        for placement in placements:
            chosen[index[placement.module]] = len(placement.gpus), placement.quota
            for g in placement.gpus:
                content[g] |= 1 << index[placement.module]
        classes = Counter(content)
        packed = Packed(chosen, np.array(list(classes.values())), np.array(list(classes)))
        return cls(tuple(modules), packed)
