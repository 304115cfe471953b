"""Optimizers of modules on any layout equal torch's optimizers in one process."""

import pytest
import torch

from raymm.actors.optimizer.optimizer_config import OptimizerConfig
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import oracle_of
from tests.support.parity_oracle import parameter_errors

LR = 1e-3
CONFIG = OptimizerConfig(
    lr=LR, eps=1e-5, weight_decay=0.1, max_grad_norm=0.1, no_decay=("*norm*",), modules={
        "vision": {"lr": LR / 4, "schedule": "linear", "total_steps": 4},
        "vision_projector": {"name": "adamw", "weight_decay": 0.0},
        "llm": {"name": "muon"},
    },
)


def model() -> MultimodalModule:
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp")},
        ModalityModule(pm.build(pm.llama(tied=True), 3)),
    )


def step() -> list[dict]:
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([6, 8], 5, vision=[1])]


def optimizers(named):
    """Return torch's optimizers, and the rate of each by step."""
    def adamw(names, decay, rate):
        own = [named[name] for name in names]
        return torch.optim.AdamW(own, eps=1e-5, weight_decay=decay), rate

    llm = [name for name in named if name.startswith("language_model")]
    matrices = [n for n in llm if n.endswith("_proj.weight")]
    norms = [n for n in llm if "norm" in n]
    rest = [n for n in llm if n not in matrices + norms]
    tower = [n for n in named if n.startswith("vision_encoder.module")]
    projector = [n for n in named if n.startswith("vision_encoder.projector")]
    muon = torch.optim.Muon(
        [named[n] for n in matrices], weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    slow = lambda step: LR / 4 * (1 - step / 4)  # noqa: E731
    return [
        (muon, lambda step: LR),
        adamw(norms, 0.0, lambda step: LR), adamw(rest, 0.1, lambda step: LR),
        adamw([n for n in tower if "norm" in n], 0.0, slow),
        adamw([n for n in tower if "norm" not in n], 0.1, slow),
        adamw(projector, 0.0, lambda step: LR),
    ]


@pytest.mark.cells(1)
@pytest.mark.parametrize("llm", [{"pp": 2}, {"dp": 2, "sharding": "zero1"}, {"cp": 2}])
def test_three_steps_equal_torch_optimizers(ray_cluster, llm):
    described = model()
    oracle = oracle_of(described)
    named = {name: p for name, p in oracle.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in named.items()}
    due = optimizers(named)
    spec = MultimodalParallelSpec({"vision": ParallelSpec(tp=2)}, ParallelSpec(**llm), 2)
    with spec.apply(described, optimizer=CONFIG) as parallel:
        for number in range(3):
            oracle.zero_grad()
            oracle.loss(step()).backward()
            torch.nn.utils.clip_grad_norm_(named.values(), 0.1)
            for optimizer, rate in due:
                for group in optimizer.param_groups:
                    group["lr"] = rate(number)
                optimizer.step()
            assert parallel.train_step(step()).learning_rate == LR
        after = {name: p.detach() for name, p in named.items()}
        # Muon computes five successive products in bf16: a rounding error is a few 2^-8.
        assert parameter_errors(parallel.parameters(), after, before, LR, 2e-2) == []


@pytest.mark.parametrize(("spec", "modules", "says"), [
    ({"tp": 2}, {"llm": {"name": "muon"}},
     "tp of 'llm' is 2, under which no process has a full matrix"),
    ({"dp": 2, "sharding": "fsdp"}, {"llm": {"name": "muon"}}, "sharding of 'llm' is 'fsdp'"),
    ({}, {"text": {"lr": 1.0}},
     "optimizer.modules has 'text'; the model's modules are vision, llm, vision_projector"),
])  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_starts(ray_cluster, spec, modules, says):
    plan = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(**spec), 2)
    with pytest.raises(PlanError, match=says):
        plan.apply(model(), optimizer=OptimizerConfig(modules=modules))
