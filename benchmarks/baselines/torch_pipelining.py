"""`torch.distributed.pipelining` Schedule1F1B over gloo, its four ranks in plain Ray actors."""

import torch
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from benchmarks.baselines.chain import (
    HIDDEN,
    ChainConfig,
    ChainLoss,
    ChainStage,
    chain_inputs,
)
from benchmarks.baselines.gloo import GlooContender, GlooWorker


class PipeliningWorker(GlooWorker):
    """Worker with fixed shapes, so that nothing is inferred during a step."""

    def configure(self, config: ChainConfig) -> None:
        self.config = config
        self.module = ChainStage(config, self.index)
        example = torch.zeros(config.rows, HIDDEN)
        stage = PipelineStage(
            self.module,
            self.index,
            config.stages,
            torch.device("cpu"),
            input_args=example.clone().requires_grad_(self.index > 0),
            output_args=example.clone().requires_grad_(),
        )
        self.schedule = Schedule1F1B(
            stage, config.microbatches, loss_fn=ChainLoss(config), scale_grads=False
        )
        is_first, is_last = self.index == 0, self.index == config.stages - 1
        self.arguments = (chain_inputs(config),) if is_first else ()
        # The schedule requires a target to split; the loss ignores it.
        self.target = torch.zeros(config.microbatches, 1) if is_last else None

    def step(self) -> None:
        self.module.weight.grad = None
        self.losses = []
        collect = self.losses if self.target is not None else None
        self.schedule.step(
            *self.arguments, target=self.target, losses=collect, return_outputs=False
        )

    def facts(self) -> tuple[float, float]:
        return sum(loss.item() for loss in self.losses), self.module.weight.grad.item()


class PipeliningContender(GlooContender):
    """Contender of PyTorch's own pipeline runtime."""

    name = "torch_pipelining"
    worker_class = PipeliningWorker
