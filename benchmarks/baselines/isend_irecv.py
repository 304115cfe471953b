"""Floor: a bare isend/irecv loop over gloo in 1F1B order, with preallocated buffers."""

import torch
import torch.distributed as dist

from benchmarks.baselines.chain import HIDDEN, ChainConfig, StageRunner, one_f_one_b
from benchmarks.baselines.gloo import GlooContender, GlooWorker


class LoopWorker(GlooWorker):
    """Worker that posts every receive at the start of the step, then follows the 1F1B order."""

    def configure(self, config: ChainConfig) -> None:
        self.runner = StageRunner(config, self.index)
        self.order = one_f_one_b(config, self.index)
        shape = (config.microbatches, config.rows, HIDDEN)
        self.activations = () if self.runner.is_first else torch.zeros(shape).unbind()
        self.gradients = () if self.runner.is_last else torch.zeros(shape).unbind()

    def step(self) -> None:
        before, after = self.index - 1, self.index + 1
        activations = [dist.irecv(x, before, tag=m) for m, x in enumerate(self.activations)]
        gradients = [dist.irecv(g, after, tag=m) for m, g in enumerate(self.gradients)]
        sends = []
        for direction, m in self.order:
            if direction == "forward":
                if activations:
                    activations[m].wait()
                y = self.runner.forward(m, self.activations[m] if activations else None)
                if y is not None:
                    sends.append((dist.isend(y, after, tag=m), y))
            else:
                if gradients:
                    gradients[m].wait()
                gradient = self.runner.backward(m, self.gradients[m] if gradients else None)
                if gradient is not None:
                    sends.append((dist.isend(gradient, before, tag=m), gradient))
        for work, _ in sends:  # keep the tensor alive until its send is done
            work.wait()

    def facts(self) -> tuple[float, float]:
        return self.runner.facts()


class LoopContender(GlooContender):
    """Contender of isend/irecv calls without a runtime."""

    name = "isend_irecv_floor"
    worker_class = LoopWorker
