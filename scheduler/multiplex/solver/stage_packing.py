"""A stage and its placements as the compiled searches see them: arrays by module, and GPUs with
the same modules on them as one class."""

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
        own: whether e3 multiplies a module's own use with that of the others, not the product.
        relative: whether a delay is a share of the module's seconds alone.
    """

    constant: float
    additive: float
    product: float
    own: bool
    relative: bool

    @classmethod
    def of(cls, model: Interference) -> InterferenceLaw:
        """That of a model."""
        return cls(
            float(model.constant), float(model.additive), float(model.product),
            model.coupling == "own", model.unit == "relative",
        )


class Pool(NamedTuple):
    """What a stage's modules share.

    Attributes:
        gpus, steps, memory: GPUs, quota steps of each, bytes of each.
        law: how modules on a GPU delay each other.
    """

    gpus: int
    steps: int
    memory: int
    law: InterferenceLaw


class StageInputs(NamedTuple):
    """What a search for placements of a stage's K modules is told.

    Attributes:
        seconds: (K, J, steps + 1) alone, by module, log2 of the degree and quota.
        memory: (K, J) int64, bytes on each GPU.
        bandwidth: (K, steps + 1) share of the bandwidth.
        entry: (K, J, steps + 1) lower bounds of seconds beside any other module.
        pool: the GPUs.
    """

    seconds: np.ndarray
    memory: np.ndarray
    bandwidth: np.ndarray
    entry: np.ndarray
    pool: Pool


class Packed(NamedTuple):
    """Modules on GPUs, of which those with the same modules are one class.

    Attributes:
        chosen: (K, 2) int64, degree and quota of each module; 0 for those that are nowhere yet.
        gpus: (C,) int64, how many GPUs a class has.
        content: (C,) int64, which modules are on them, as bits.
    """

    chosen: np.ndarray
    gpus: np.ndarray
    content: np.ndarray


@dataclass(frozen=True, eq=False)
class StagePacking:
    """Named modules on GPUs.

    Attributes:
        modules: names.
        packed: options and classes, modules in the order of ``modules``.
    """

    modules: tuple[str, ...]
    packed: Packed

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """With the GPUs of all classes numbered, those with most modules first."""
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
            Placement(name, tuple(on), int(quota))
            for name, on, quota in zip(self.modules, sets, self.packed.chosen[:, 1], strict=True)
        )

    @classmethod
    def of(
        cls, modules: Sequence[str], placements: Sequence[Placement], gpus: int
    ) -> StagePacking:
        """The classes of placements.

        Args:
            modules: names, in the order that the packing is to have.
            placements: one of each module.
            gpus: how many there are, also those with nothing on them.
        """
        at = {name: i for i, name in enumerate(modules)}
        chosen = np.zeros((len(modules), 2), np.int64)
        content = [0] * gpus
        for placement in placements:
            chosen[at[placement.module]] = len(placement.gpus), placement.quota
            for g in placement.gpus:
                content[g] |= 1 << at[placement.module]
        classes = Counter(content)
        packed = Packed(chosen, np.array(list(classes.values())), np.array(list(classes)))
        return cls(tuple(modules), packed)
