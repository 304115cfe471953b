"""raymm's own runtime on the chain: programs run in actors, one call per actor and step."""

from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.baselines.chain import ChainConfig, ChainLoss, ChainResult, ChainStage, chain_inputs
from benchmarks.baselines.contender import Contender
from benchmarks.shared.rank_p2p_groups import p2p_groups_between_ranks
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.modules.message import Message, MicrobatchContext
from raymm.actors.rank.rank_group import RankGroup
from raymm.actors.rank.rank_resources import RankResources
from raymm.actors.rank.rank_spec import RankSpec, connection_plans
from raymm.scheduler.graph.module_graph import ModuleGraph, ModuleNode
from raymm.scheduler.plan.plan import Plan, Stage
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.schedule.lower import lower


class RaymmStage(nn.Module):
    """Stage of the chain behind the interface that raymm's executor runs."""

    def __init__(self, config: ChainConfig, index: int) -> None:
        super().__init__()
        self.stage = ChainStage(config, index)
        self.loss = ChainLoss(config) if index == config.stages - 1 else None
        self.inputs = chain_inputs(config).chunk(config.microbatches) if index == 0 else None
        self.eval()  # no dropout: no seeding per microbatch

    def run(
        self, inputs: dict[str, Any] | None, received: dict[str, Message],
        context: MicrobatchContext,
    ) -> Message:
        if context.microbatch == 0:
            self.stage.weight.grad = None
        if self.inputs is not None:
            x = self.inputs[context.microbatch]
        else:
            (message,) = received.values()
            x = message.tensors[0]
        y = self.stage(x)
        return Message((y,), {}) if self.loss is None else Message((), {}, loss=self.loss(y))


def chain_plan(config: ChainConfig) -> Plan:
    """Return a plan with one stage per rank."""
    graph = ModuleGraph((ModuleNode("chain", (True,) * config.stages),), ())
    stages = tuple(Stage("chain", i, (i, i + 1), i) for i in range(config.stages))
    return Plan(graph, stages, config.microbatches)


class RaymmContender(Contender):
    """Contender that makes the trainer's driver call per step: `submit` and wait."""

    name = "raymm"

    def __init__(self) -> None:
        self.group: RankGroup | None = None
        self.results: list = []
        self.stage: Any = RaymmStage

    def setup(self, config: ChainConfig) -> None:
        plan = chain_plan(config)
        builders = [
            {stage.id: partial(self.stage, config, stage.index)} for stage in plan.stages
        ]
        places = {stage.id: stage.rank for stage in plan.stages}
        connections = connection_plans(
            plan.num_ranks, p2p_groups_between_ranks(plan.stage_edges, places)
        )
        if self.group is None:
            specs = [
                RankSpec(
                    rank=rank, world_size=plan.num_ranks, builders=builders[rank],
                    edges=plan.stage_edges, connections=connections[rank],
                )
                for rank in range(plan.num_ranks)
            ]
            self.group = RankGroup(specs, [s.id for s in plan.stages], RankResources(1.0))
        else:
            self.group.rebuild(builders)
        program = lower(plan, [()] * config.microbatches)
        proof = check_program(program)
        self.key = self.group.load_program(program, proof.issues, proof.bound)
        self.inputs: list[list] = [[] for _ in builders]
        keys = (config.message_bytes,) * config.microbatches
        self.meta = StepMeta(step=0, label_tokens=1, keys=keys)

    def dispatch(self) -> None:
        self.results = self.group.submit(self.key, self.meta, self.inputs).result()

    def pids(self) -> list[int]:
        return [process["pid"] for process in self.group.pids()]

    def result(self) -> ChainResult:
        gradients: dict[int, torch.Tensor] = {}
        for part in self.group.call("gradients"):
            for (stage, _), gradient in part.items():
                gradients[stage.index] = gradient
        losses = [value for one in self.results for value in one.losses.values()]
        return ChainResult(sum(losses), tuple(gradients[i].item() for i in sorted(gradients)))

    def close(self) -> None:
        if self.group is not None:
            self.group.shutdown()
            self.group = None
