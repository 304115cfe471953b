"""Random numbers of a module that do not depend on how the module is cut.

Each place of a module (a callback, the forward outside the blocks, each block, the projector) has a
separate stream. Its seed is derived from the run's seed, the step, the batch (with gradient
accumulation), the module, the microbatch and the place, but not from the stage. Hence:

- Draws outside the blocks (which blocks to skip, the scale of a rotary table) are equal in all
  stages, which all repeat them.
- Draws in a block equal those of the complete module in one process.
- A forward that runs again draws the same numbers.

The stream outside the blocks restarts after each block, so later numbers do not depend on draws in
blocks, which may be on other stages.

Processes that share a module draw the numbers of one process, in the shape of the full tensor, and
use their slice (:mod:`raymm.kernels.shared_draws`).
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
    """Return a 63-bit seed derived from objects with a stable ``str``."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


class Draws:
    """Random number streams of one module in one microbatch (:func:`module_draws`). If
    ``observed``, ``drawn`` records whether numbers were drawn before the last :meth:`end`."""

    def __init__(self, seed: int, observed: bool = False) -> None:
        self._seed, self._observed = seed, observed
        self._untouched: tuple[bytes, ...] | None = None
        self.drawn = False

    def enter(self, place: str) -> None:
        """Switch to the stream of a place."""
        self.reseed(derive_seed(self._seed, place))

    def reseed(self, seed: int) -> None:
        """Switch to the stream of a seed."""
        self.end()
        seed_generators(seed)
        if self._observed:
            self._untouched = generator_state()

    def end(self) -> None:
        """Stop observing draws until the next switch."""
        if self._observed and self._untouched is not None:
            self.drawn |= generator_state() != self._untouched


def module_draws(
    seed: int, step: int, module: str, microbatch: int, observed: bool = False, batch: int = 0
) -> Draws:
    """Return a module's random number streams for a microbatch of a step.

    Args:
        module: name, the same for all of its stages and replicas.
        batch: number of the batch among those whose gradients the step accumulates.
    """
    accumulated = ("batch", batch) if batch else ()
    return Draws(derive_seed(seed, step, module, microbatch, *accumulated), observed)


class BlockDraws:
    """Hooks that give each block of a list, which must include placeholders for the blocks of other
    stages, a separate random number stream."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        self._draws: Draws | None = None
        self._outside: list[int] = []
        self._hooks = []
        for index, block in enumerate(blocks):
            # Runs around all other hooks; always_call covers recomputation that stops early.
            self._hooks += [
                block.register_forward_pre_hook(partial(self._enter, index), prepend=True),
                block.register_forward_hook(partial(self._leave, index), always_call=True),
            ]

    def use(self, draws: Draws | None) -> None:
        """Set the random numbers of the next forward; None leaves the generators unchanged."""
        self._draws = draws

    def remove(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    # The seed of the outside stream is read from torch's generator because checkpointing restores
    # the generator before it reruns a block. By then other microbatches have run.

    def _enter(self, index: int, *_: Any) -> None:
        if self._draws is None:
            return
        seed = torch.initial_seed()
        self._outside.append(seed)
        self._draws.reseed(derive_seed(seed, "block", index))

    def _leave(self, index: int, *_: Any) -> None:
        if self._draws is None or not self._outside:
            return
        self._draws.reseed(derive_seed(self._outside.pop(), "after", index))
