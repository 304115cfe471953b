"""A stage's placements as classes of GPUs, which is how searches see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from raymm.scheduler.multiplex.mapping import Placement
from raymm.scheduler.multiplex.problem import bits


@dataclass(frozen=True, eq=False)
class StagePacking:
    """Modules on GPUs, of which those with the same modules are one class.

    Attributes:
        modules: names.
        chosen: (K, 2) degree and quota of each.
        gpus: (C,) how many GPUs a class has.
        content: (C,) which modules are on them, as bits in the order of ``modules``.
    """

    modules: tuple[str, ...]
    chosen: np.ndarray
    gpus: np.ndarray
    content: np.ndarray

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """With the GPUs of all classes numbered, those with most modules first."""
        sets: list[list[int]] = [[] for _ in self.modules]
        first = 0
        order = sorted(
            range(len(self.gpus)), key=lambda c: (-int(self.content[c]).bit_count(), c)
        )
        for c in order:
            for local in bits(int(self.content[c])):
                sets[local].extend(range(first, first + int(self.gpus[c])))
            first += int(self.gpus[c])
        return tuple(
            Placement(name, tuple(on), int(quota))
            for name, on, quota in zip(self.modules, sets, self.chosen[:, 1], strict=True)
        )

    @classmethod
    def of(
        cls, modules: Sequence[str], placements: Sequence[Placement], gpus: int
    ) -> StagePacking:
        """The classes of placements, in the order of ``modules``."""
        at = {name: i for i, name in enumerate(modules)}
        chosen = np.zeros((len(modules), 2), np.int64)
        content = [0] * gpus
        for one in placements:
            chosen[at[one.module]] = len(one.gpus), one.quota
            for g in one.gpus:
                content[g] |= 1 << at[one.module]
        classes = Counter(content)
        return cls(
            tuple(modules), chosen, np.array(list(classes.values())), np.array(list(classes))
        )
