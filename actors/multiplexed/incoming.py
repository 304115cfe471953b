"""What a GPU's readers have of the gradient of an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from raymm.actors.modules.node import Tensors
from raymm.actors.multiplexed.messages import Flags
from raymm.kernels.collectives.waiting import Waitable, wait
from raymm.scheduler.graph.sample_ranges import Range


class Incoming(NamedTuple):
    """A part of the gradient of a part's output.

    Attributes:
        rows: of the output.
        gradients: by output.
        works: to wait for before these are there.
        present: tells which of them are gradients; the others are zero, as no reader has one.
    """

    rows: Range
    gradients: Tensors
    works: list[Waitable]
    present: Callable[[], frozenset[str]]

    def add_to(self, total: Tensors, values: Tensors, lo: int) -> None:
        """Add it to a sum, once it is there.

        Args:
            total: by output; those that nothing was added to are missing.
            values: the outputs.
            lo: the row of the whole output that is their first.
        """
        for work in self.works:
            wait(work)
        present, lo = self.present(), self.rows.lo - lo
        for name, gradient in self.gradients.items():
            if name in present:
                if name not in total:
                    total[name] = torch.zeros_like(values[name])
                total[name][lo : lo + self.rows.size].add_(gradient)


def flagged(flags: Flags | None, first: int, names: Sequence[str]) -> frozenset[str]:
    """The names whose flags are set.

    Args:
        flags: that came; only None if there are no names.
        first: which is that of the first name.
        names: in the order of the flags.
    """
    if flags is None:
        return frozenset()
    present = flags.read()[first : first + len(names)]
    return frozenset(name for name, flag in zip(names, present, strict=True) if flag)
