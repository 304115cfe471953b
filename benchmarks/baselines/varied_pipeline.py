"""raymm's runtime on the chain with messages of many shapes: as many bytes as the others', to
within 7%, in another shape from microbatch to microbatch."""

from functools import partial

import torch

from benchmarks.baselines.chain import HIDDEN, ChainConfig
from benchmarks.baselines.raymm_pipeline import RaymmContender, RaymmStage
from raymm.actors.executor.step_meta import LayoutKey, StepMeta
from raymm.actors.modules.message import Message, MicrobatchContext

SHAPES = 1000
SHARE = 0.07
"""Of a message's elements, by which messages differ at most."""


def elements(config: ChainConfig, number: int, shapes: int) -> int:
    """Of the message of a run's microbatch `number`; all alike where numbers are compared."""
    whole = config.rows * HIDDEN
    if config.scaled:
        return whole
    fewest = whole - int(SHARE * whole)
    # A number without a common divisor with any count here: neighbours are far apart.
    return fewest + (number * 7919) % shapes * (whole - fewest) // shapes


class VariedStage(RaymmStage):
    """A stage whose microbatches are of another shape each."""

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
    """A thousand shapes again and again, all of which have been there before anything is timed."""

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
        structure = int(self._config.scaled)  # whose messages are of another form
        keys = tuple(LayoutKey(size, structure, (size,)) for size in sizes)
        self.meta = StepMeta(step=0, label_tokens=1, keys=keys)
        self._steps += 1
        super().dispatch()


class NewShapesContender(VariedContender):
    """Shapes that mostly have not been there before."""

    name = "raymm_new_shapes"
    shapes, seen = 10**6, False
