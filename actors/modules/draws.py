"""Which random numbers a module draws: the same wherever it is cut.

Every place of a module (a callback, its forward outside the blocks, each block, its projector) has
a stream of its own, which follows from the run's seed, the step, the batch (of several whose
gradients a step accumulates), the module, the microbatch and the place, not from the stage. So a
draw outside the blocks (which blocks this forward skips, a rotary table's scale) is the same in all
stages, which all make it; a draw in a block is what the whole module in one process draws there;
and a forward that is run again draws what it drew.

The stream outside the blocks begins anew after each block: whatever a block drew, or another
stage's block would have drawn, no later number depends on it.

Processes that share a module draw the numbers of one process, each in the shape of the full tensor,
and take those of their part (:mod:`raymm.kernels.shared_draws`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from raymm.actors.quota.generators import generator_state, seed_generators


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from anything with a stable ``str``, whatever the layout."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Draws:
    """One module's random numbers in one microbatch.

    Args:
        seed: that all of them follow from (:func:`module_draws`).
        observed: True to record in ``drawn`` that numbers were drawn.

    Attributes:
        drawn: whether there were, until :meth:`end`.
    """

    def __init__(self, seed: int, observed: bool = False) -> None:
        self._seed, self._observed = seed, observed
        self._untouched: tuple[bytes, ...] | None = None
        self.drawn = False

    def enter(self, place: str) -> None:
        """What is drawn from now on belongs to this place."""
        self.reseed(derive_seed(self._seed, place))

    def reseed(self, seed: int) -> None:
        """What is drawn from now on follows from this seed."""
        self.end()
        seed_generators(seed)
        if self._observed:
            self._untouched = generator_state()

    def end(self) -> None:
        """Nothing is drawn any more, for now."""
        if self._observed and self._untouched is not None:
            self.drawn |= generator_state() != self._untouched


def module_draws(
    seed: int, step: int, module: str, microbatch: int, observed: bool = False, batch: int = 0
) -> Draws:
    """A module's random numbers in a microbatch of a step.

    Args:
        seed: of the run.
        step: number of the optimizer step.
        module: its name, the same for all of its stages and copies.
        microbatch: its number within the batch.
        observed: note whether any are drawn.
        batch: number of the batch, of those whose gradients the step accumulates.
    """
    accumulated = ("batch", batch) if batch else ()
    return Draws(derive_seed(seed, step, module, microbatch, *accumulated), observed)


class BlockDraws:
    """Gives each block of a list its own random numbers, from outside.

    Args:
        blocks: the whole list; of a stage, with what stands in for other stages' blocks.

    Attributes:
        draws: of the forward under way, or of the last one; None: leave the generators alone.
    """

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self.draws: Draws | None = None
        self._outside: list[int] = []
        self._hooks = []
        for index, block in enumerate(blocks):
            # Around all other hooks. Leaving is noted also where recomputation stops early.
            self._hooks += [
                block.register_forward_pre_hook(partial(self._enter, index), prepend=True),
                block.register_forward_hook(partial(self._leave, index), always_call=True),
            ]

    def remove(self) -> None:
        """Leave the blocks as they were."""
        for hook in self._hooks:
            hook.remove()

    # The seed of the stream outside is asked of torch's generator, where checkpointing puts it
    # back before it runs a block again: by then other microbatches have been under way.

    def _enter(self, index: int, *_: Any) -> None:
        if self.draws is None:
            return
        outside = torch.initial_seed()
        self._outside.append(outside)
        self.draws.reseed(derive_seed(outside, "block", index))

    def _leave(self, index: int, *_: Any) -> None:
        if self.draws is None or not self._outside:
            return
        self.draws.reseed(derive_seed(self._outside.pop(), "after", index))
