"""Full training steps of one rank of a plan, on the CPU and on the pretended GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.devices.pretended_gpu.device import pretended_gpu
from benchmarks.devices.pretended_gpu.kernels import cpu_kernels
from benchmarks.gpu.one_rank import OPTIMIZER, TINY, VISION, microbatches
from benchmarks.shared.tcp_rendezvous import TcpRendezvousStore
from raymm.actors.executor.step_meta import StepMeta
from raymm.actors.rank.rank_actor import RankActor
from raymm.layout.rank_specs import rank_specs
from raymm.model.batch_rules import text_inputs
from raymm.model.modality_module import ModalityModule
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.search.stage_space import make_plan

START, WITHIN, END = PARTS = "start", "within", "end"
STEPS = 3
"""Number of steps. Waits are counted in the last, when layouts and gradients are known."""
# Relative differences of losses and norms: other summation order, or rounding to bf16.
FP32_BOUND, BF16_BOUND = 1e-5, 1e-3


@dataclass(frozen=True)
class Case:
    """Model and its settings.

    Attributes:
        autocast: name of a dtype.
        cuts: layers of the language model's stages; the encoder is on the first one's rank.
    """

    autocast: str | None = None
    frozen: bool = False
    options: Mapping[str, Any] = field(default_factory=lambda: {"mask": "multimodal"})
    cuts: tuple[tuple[int, int], ...] = ((0, 2),)

    @property
    def bound(self) -> float:
        """Return the accepted relative difference."""
        return BF16_BOUND if self.autocast else FP32_BOUND


CASES = {
    "fp32": Case(),
    "bf16": Case("bfloat16"),
    "frozen": Case("bfloat16", frozen=True),
    "plain": Case("bfloat16", options={}),
    "packed": Case(options={"packing": True}),
    "two ranks": Case("bfloat16", cuts=((0, 1), (1, 2))),
    "two ranks, plain": Case(options={}, cuts=((0, 1), (1, 2))),
}


def _model(case: Case) -> MultimodalModule:
    from transformers import LlamaConfig, SiglipVisionConfig

    vision = ModalityModule(
        SiglipVisionConfig(**TINY.vision), "mlp", frozen=case.frozen, seed=1
    )
    llm = ModalityModule(LlamaConfig(**TINY.llm), frozen=case.frozen, seed=2)
    return MultimodalModule({VISION: vision}, llm, **case.options)


def _plan(model: MultimodalModule, case: Case) -> Plan:
    graph = module_graph(model)
    layers = {node.name: ((0, node.num_layers),) for node in graph.nodes}
    plan = make_plan(graph, {**layers, LANGUAGE_MODEL: case.cuts}, TINY.microbatches)
    stages = tuple(
        replace(stage, rank=stage.index if stage.module == LANGUAGE_MODEL else 0)
        for stage in plan.stages
    )
    return replace(plan, stages=stages, shared_ranks=None)


class RankProcess:
    """Rank of a plan in this process, with everything that an actor does in a step."""

    def __init__(
        self, case: Case, rank: int, port: int, kind: str, waits: dict[str, int]
    ) -> None:
        model = _model(case)
        plan = _plan(model, case)
        specs = rank_specs(
            model, plan, optimizer=OPTIMIZER, autocast=case.autocast, device=kind, threads=1
        ).specs
        self.actor = RankActor(specs[rank])
        stores: Any = {0: TcpRendezvousStore(rank, len(specs), port)}
        self.actor._stores = stores
        self.actor.connect({})
        self.actor.build()
        self._plan, self._rank = plan, rank
        self.load()
        self._inputs = self._of_rank(plan, rank)
        self._labels = sum(
            int((batch["labels"][:, 1:] != -100).sum()) for batch in microbatches(TINY)
        )
        self._number = 0
        self._waits = waits
        # Waits of the last step by part: before its first instruction, in its instructions, after.
        self.counted: dict[str, dict[str, int]] = {}
        enter = self.actor.task_tracker.enter

        def noting(instruction: Any) -> None:
            enter(instruction)
            if not isinstance(instruction, str) and not self.counted:
                self._close(START)
            elif instruction == "the end of a step":
                self._close(WITHIN)

        self.actor.task_tracker.enter = noting

    def _close(self, part: str) -> None:
        """Assign the waits since the last part of the step to this one."""
        self.counted[part] = dict(self._waits)
        self._waits.clear()

    def load(self) -> None:
        """Load the step's program, which the actor drops when it reconnects."""
        program = lower(self._plan, [(VISION,)] * TINY.microbatches)
        proof, rank = check_program(program), self._rank
        ops = tuple(op for op in OPTIMIZER_OPS if op != Op.REDUCE_GRADS)  # no gradients to reduce
        self.actor.load_program(
            "step", program.with_optimizer_ops(ops).ranks[rank], proof.issues[rank], proof.bound
        )

    def _of_rank(self, plan: Plan, rank: int) -> list[tuple[Any, int, dict[str, Any]]]:
        inputs = []
        for number, batch in enumerate(microbatches(TINY)):
            for module, values in ((VISION, batch[VISION]), (LANGUAGE_MODEL, text_inputs(batch))):
                reader = plan.replicas(module)[0][0]
                if reader.rank == rank:
                    inputs.append((reader.id, number, values))
        return inputs

    def step(self) -> tuple[float, float]:
        """Run a step; return its loss (0 if another rank has it) and the norm of all gradients."""
        meta = StepMeta(self._number, self._labels, (0,) * TINY.microbatches)
        self._number += 1
        layout = [(stage, microbatch) for stage, microbatch, _ in self._inputs]
        self._waits.clear()
        self.counted = {}
        result = self.actor.run_step("step", meta, layout, *(i for *_, i in self._inputs))
        self._close(END)
        return sum(result.losses.values()), result.grad_norm or 0.0


def run(name: str, rank: int, port: int) -> dict[str, Any]:
    """Run steps of a rank on both devices.

    Args:
        port: port of the local rendezvous; the next port is for the second rendezvous.
    """
    torch.set_num_threads(1)
    case, numbers, counted = CASES[name], [], {}
    with pretended_gpu() as waits, cpu_kernels():
        for again, kind in enumerate(("cpu", "cuda")):
            process = RankProcess(case, rank, port + again, kind, waits)
            steps = []
            for _ in range(STEPS):
                steps.append(process.step())
            counted = process.counted
            numbers.append(torch.tensor(steps, dtype=torch.float64, device="cpu"))
            dist.destroy_process_group()
    difference = (numbers[1] - numbers[0]).abs() / numbers[0].abs().clamp(min=1e-6)
    return {"waits": counted, "max_relative_error": float(difference.max())}
