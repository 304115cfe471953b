"""raymm's runtime on the chain with messages of many shapes.

Messages have the same number of bytes as those of other contenders, to within 7%, in another shape
in each microbatch.
"""

from functools import partial

import torch

from benchmarks.baselines.chain import HIDDEN, ChainConfig
from benchmarks.baselines.raymm_pipeline import RaymmContender, RaymmStage
from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.actors.modules.message import Message, MicrobatchContext

SHAPES = 1000
SHARE = 0.07
"""Largest relative difference in the number of elements."""


def elements(config: ChainConfig, number: int, shapes: int) -> int:
    """Return the elements of microbatch `number`'s message; constant when numbers are compared."""
    whole = config.rows * HIDDEN
    if config.scaled:
        return whole
    fewest = whole - int(SHARE * whole)
    # A number coprime to all counts here, so that neighbours are far apart.
    return fewest + (number * 7919) % shapes * (whole - fewest) // shapes


class VariedStage(RaymmStage):
    """Stage whose microbatches have different shapes."""

    def __init__(self, config: ChainConfig, index: int, shapes: int) -> None:
        super().__init__(config, index)
        self.config, self.shapes, self.number = config, shapes, 0
        self.whole = self.inputs

    def run(
        self, inputs: dict | None, received: dict[str, Message], context: MicrobatchContext
    ) -> Message:
        if self.whole is not None and not self.config.scaled:
            size = elements(self.config, self.number, self.shapes)
            own: list[torch.Tensor] = list(self.whole)
            own[context.microbatch] = own[context.microbatch].reshape(1, -1)[:, :size]
            self.inputs = tuple(own)
        self.number += 1
        return super().run(inputs, received, context)


class VariedContender(RaymmContender):
    """Contender that repeats a thousand shapes, all of them seen before anything is timed."""

    name = "raymm_1000_shapes"
    shapes, seen = SHAPES, True

    def setup(self, config: ChainConfig) -> None:
        self.stage = partial(VariedStage, shapes=self.shapes)
        super().setup(config)
        self._config, self._steps = config, 0
        if self.seen and not config.scaled:
            for _ in range(-(-self.shapes // config.microbatches)):
                self.dispatch()

    def dispatch(self) -> None:
        count = self._config.microbatches
        numbers = range(self._steps * count, (self._steps + 1) * count)
        sizes = (elements(self._config, n, self.shapes) for n in numbers)
        structure = int(self._config.scaled)  # whose messages have another structure
        keys = tuple(LayoutKey(size, structure, (size,)) for size in sizes)
        self.meta = StepMeta(step=0, label_tokens=1, keys=keys)
        self._steps += 1
        super().dispatch()


class NewShapesContender(VariedContender):
    """Contender with mostly new shapes."""

    name = "raymm_new_shapes"
    shapes, seen = 10**6, False
