"""Model, its plan for one rank, and that rank in this process.

The object that Ray would start as an actor is local here, with everything that an actor does in a
step.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.device import Device
from benchmarks.shared.tcp_rendezvous import use_loopback
from raymm.actors.executor.step_meta import StepMeta, StepResult
from raymm.actors.memory.to_device import to_device
from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.actors.rank.rank_actor import RankActor
from raymm.costs.analytic import analytic_profile
from raymm.costs.load import Load
from raymm.costs.named_devices import DEFAULT_GPU, device_called
from raymm.layout.rank_specs import rank_specs
from raymm.model.batch_rules import complete_microbatch, text_inputs
from raymm.model.modality_module import ModalityModule
from raymm.model.model import LANGUAGE_MODEL
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.model.vlm import PretrainedVlm
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.program.check_program import check_program
from raymm.scheduler.program.program import OPTIMIZER_OPS, Op, Program
from raymm.scheduler.schedule.lower import lower
from raymm.scheduler.search.module_degrees import make_plan

OPTIMIZER = OptimizerConfig(lr=1e-4)
VISION = "vision"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a vision-language model and its step.

    Attributes:
        rows, text: rows of a microbatch, and text tokens of each; every row has an image.
    """

    vision: dict[str, int]
    llm: dict[str, int]
    rows: int
    text: int
    microbatches: int

    @property
    def image_tokens(self) -> int:
        """Return the tokens of an image."""
        return (self.vision["image_size"] // self.vision["patch_size"]) ** 2

    @property
    def tokens(self) -> int:
        """Return the tokens of a merged row."""
        return self.text + self.image_tokens


TINY = Sizes(
    {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1,
     "image_size": 32, "patch_size": 16},
    {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
     "num_key_value_heads": 1, "vocab_size": 128},
    rows=2, text=24, microbatches=2,
)  # fmt: skip
LARGE = Sizes(
    {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12,
     "num_attention_heads": 16, "image_size": 384, "patch_size": 16},
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
     "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 32000},
    rows=2, text=3520, microbatches=4,
)  # fmt: skip


def build_model(sizes: Sizes, frozen: bool = False) -> MultimodalModule:
    """Build SigLIP, an MLP and Llama with seeded random weights."""
    from transformers import LlamaConfig, SiglipVisionConfig

    vision = ModalityModule(SiglipVisionConfig(**sizes.vision), "mlp", frozen=frozen, seed=1)
    llm = ModalityModule(LlamaConfig(**sizes.llm), frozen=frozen, seed=2)
    return MultimodalModule({VISION: vision}, llm, mask="multimodal")


def microbatches(sizes: Sizes) -> list[dict[str, Any]]:
    """Return random tokens and images of a step, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(sizes.microbatches):
        shape = (sizes.rows, sizes.text)
        ids = torch.randint(1, sizes.llm["vocab_size"], shape, generator=generator)
        side = sizes.vision["image_size"]
        pixels = torch.randn((sizes.rows, 3, side, side), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone(), VISION: {"pixel_values": pixels}}
        found.append(complete_microbatch(batch, (VISION,)))
    return found


def step_inputs(
    batches: Sequence[dict[str, Any]],
) -> tuple[list[dict[str, dict[str, Any]]], int]:
    """Return inputs of a step by microbatch and module, and the number of label tokens."""
    parts = [{VISION: batch[VISION], LANGUAGE_MODEL: text_inputs(batch)} for batch in batches]
    return parts, sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def plan_of(device: Device, model: MultimodalModule, sizes: Sizes) -> Plan:
    """Return a plan with all stages on one rank and the planner's costs for this device."""
    name = torch.cuda.get_device_name(0) if device.is_gpu else "cpu"
    spec = device_called(name)
    loads = {
        VISION: Load(sizes.rows, sizes.image_tokens),
        LANGUAGE_MODEL: Load(sizes.rows, sizes.tokens, sizes.rows * (sizes.text - 1)),
    }
    profile = analytic_profile(model, loads, spec or DEFAULT_GPU, "bf16")
    graph = module_graph(model)
    whole = {node.name: ((0, node.num_layers),) for node in graph.nodes}
    plan = make_plan(graph, whole, sizes.microbatches, profile=profile)
    return on_one_rank(plan)


def on_one_rank(plan: Plan) -> Plan:
    """Return the plan with all of its stages on the first rank."""
    stages = tuple(replace(stage, rank=0) for stage in plan.stages)
    return replace(plan, stages=stages, shared_ranks=None)


class OneRank:
    """Only rank of a plan, in this process.

    Args:
        kind: ``"cpu"`` or ``"cuda"``.
        autocast: name of a dtype, or None.
        inputs: inputs of a step, by microbatch and module.
        update: True to clip and update after the gradients, False to leave the gradients.
        options: additional fields of the rank's specification.
    """

    def __init__(
        self, model: MultimodalModule | PretrainedVlm, plan: Plan, kind: str, autocast: str | None,
        inputs: Sequence[Mapping[str, dict[str, Any]]], labels: int,
        optimizer: OptimizerConfig = OPTIMIZER, update: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        if dist.is_initialized():  # left by a rank whose part failed
            dist.destroy_process_group()
        ranks = rank_specs(
            model, plan, optimizer=optimizer, autocast=autocast, device=kind,
            threads=torch.get_num_threads(), **options,
        )  # fmt: skip
        self.plan = plan
        self.actor = RankActor(ranks.specs[0])
        use_loopback()
        self.actor.connect({})  # there are no peers
        self.parameters = self.actor.build()
        self.program = _program(plan, len(inputs), update)
        self.load_program()
        self._layout: list[tuple[Any, int]] = []
        self._inputs: list[dict[str, Any]] = []
        for number, parts in enumerate(inputs):
            for module, values in parts.items():
                self._layout.append((plan.replicas(module)[0][0].id, number))
                self._inputs.append(values)
        self._labels = labels
        self._steps = 0

    def load_program(self) -> None:
        """Load a step's program on the rank; repeat after each new rendezvous."""
        self.actor.load_program("step", self.program.ranks[0], ())

    def rewind(self, steps: int) -> None:
        """Give the next step the index after ``steps`` others, which seeds its random numbers.

        A failed step does not count.
        """
        self._steps = steps

    def move_inputs(self, device: torch.device) -> int:
        """Keep the inputs of all future steps on a device; return their bytes."""
        self._inputs = [to_device(each, device) for each in self._inputs]
        tensors = [t for each in self._inputs for t in each.values()]
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))

    def step(self) -> StepResult:
        """Run forward, backward, clipping and update."""
        keys = tuple(0 for _ in range(self.plan.num_microbatches))  # all have the same shapes
        meta = StepMeta(self._steps, self._labels, keys)
        self._steps += 1
        return self.actor.run_step("step", meta, self._layout, *self._inputs)

    def close(self) -> None:
        """Leave the process groups and free the memory, so that another rank can be created."""
        dist.destroy_process_group()
        del self.actor, self._inputs
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _program(plan: Plan, count: int, update: bool) -> Program:
    program = lower(plan, [(VISION,)] * count)
    check_program(program)
    # A single process has no gradients to reduce.
    ops = tuple(op for op in OPTIMIZER_OPS if op != Op.REDUCE_GRADS) if update else ()
    return program.with_optimizer_ops(ops)
