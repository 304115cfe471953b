"""Adapters equal their formula, and stock ``peft`` in one process on any layout."""

from __future__ import annotations

import re
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from raymm.actors.adapters.lora import (
    adapt,
    disable_dropout,
    has_adapters,
    is_adapter,
    is_of_base,
    plain_copy,
    without_adapters,
)
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training
from tests.support.parity_oracle import Oracle, prepend

LORA = LoraConfig(r=4, alpha=8.0)
DORA = LoraConfig(r=4, alpha=8.0, dora=True, targets=("q_proj", "o_proj", "up_proj", "down_proj"))
RSLORA = LoraConfig(r=4, alpha=8.0, use_rslora=True)
NARROW = LoraConfig(r=2, targets=r".*layers\.[12]\..*_proj|lm_head")


class PeftOracle(Oracle):
    """Oracle in which stock ``peft`` adds the adapters."""

    def gradients(self) -> dict[str, torch.Tensor | None]:
        return {_own_name(name): gradient for name, gradient in super().gradients().items()}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield _own_name(name), parameter


def _own_name(name: str) -> str:
    name = name.replace(".base_model.model.", ".").replace(".base_layer.", ".")
    return re.sub(r"\.default(\.weight)?$", "", name)


def in_peft(module: torch.nn.Module, lora: LoraConfig) -> torch.nn.Module:
    """Apply stock ``peft`` to a module, with the adapters' current values."""
    if not has_adapters(module):
        return module
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    config = peft.LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=targets,
        use_dora=lora.dora, use_rslora=lora.use_rslora,
    )
    model = peft.get_peft_model(plain_copy(module, merged=False), config)
    state = {
        f"base_model.model.{name}" + ("" if name.endswith("vector") else ".weight"): p.detach()
        for name, p in module.named_parameters() if is_adapter(name)
    }
    named = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    assert set(named) == set(state)
    peft.set_peft_model_state_dict(model, {name: p.clone() for name, p in state.items()})
    return model.train()


def peft_oracle(model: MultimodalModule) -> Oracle:
    model.materialize()
    language = model.language_model
    encoders = {
        name: (in_peft(one.module, one.lora) if one.lora else one.module, one.projector)
        for name, one in model.encoders.items()
    }
    module = in_peft(language.module, language.lora) if language.lora else language.module
    return PeftOracle(encoders, module, prepend, None)


def noisy(module: ModalityModule) -> ModalityModule:
    """Set adapters to values as after some steps; an initially zero B hides the gradient of A."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if is_adapter(name):
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return module


def model_of(adapters: LoraConfig = LORA, llm: Any = None, live: bool = True, **vision: Any):
    options: dict[str, Any] = vision or {"frozen": True}
    config = llm or pm.llama(tied=False, layers=4)
    language = ModalityModule(pm.build(config, 3) if live else config, lora=adapters, seed=7)
    tower = noisy(ModalityModule(pm.build(pm.siglip(), 1), "mlp", **options))
    return MultimodalModule({"vision": tower}, noisy(language) if live else language)


def step() -> list[dict]:
    return [pm.batch([17, 9], 4, vision=[0, 0]), pm.batch([8, 3], 6, vision=[1])]


def check(model: MultimodalModule, spec: MultimodalParallelSpec) -> None:
    oracle = peft_oracle(model)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step()]])


@pytest.mark.cells(1)
@pytest.mark.parametrize("live", [True, False], ids=["live", "config"])
def test_pipeline_of_tensor_parallel_stages(ray_cluster, live):
    """Use adapters on the language model, a full projector, a frozen tower."""
    model = model_of(live=live)
    check(model, MultimodalParallelSpec(
        {"vision": ParallelSpec()}, ParallelSpec(pp=2, tp=2), 2))


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "lora", [RSLORA, NARROW, DORA], ids=["rank-stabilised", "by a pattern", "dora"])
def test_kinds_of_adapters(ray_cluster, lora):
    model = model_of(lora)
    check(model, MultimodalParallelSpec(
        {"vision": ParallelSpec()}, ParallelSpec(pp=2, tp=2), 2, "zero_bubble"))


@pytest.mark.cells(1)
@pytest.mark.parametrize(
    "layout", [
        {"dp": 2, "sharding": "zero1"}, {"dp": 2, "sharding": "fsdp"}, {"cp": 2},
        {"pp": 2, "recompute_layers": "matmuls"},
    ], ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_layouts(ray_cluster, layout):
    model = model_of(live=False)
    check(model, MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(**layout), 2))


def test_encoder_and_projector_with_adapters(ray_cluster):
    lora = LoraConfig(r=3, targets=("q_proj", "fc1"))
    model = model_of(LORA, pm.gpt2(), lora=lora, projector_lora=LoraConfig(r=2, dora=True))
    spec = MultimodalParallelSpec(
        {"vision": ParallelSpec(pp=2)}, ParallelSpec(tp=2), 2, recompute=True)
    oracle = peft_oracle(model)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


def adapted(config, kind="linear"):
    torch.manual_seed(0)
    layer = nn.Linear(6, 4) if kind == "linear" else Conv1D(4, 6)
    model = nn.Sequential(layer, nn.GELU(), nn.Linear(4, 3))
    weight = layer.weight.detach().clone()
    adapt(model, ["0"], config, seed=1)
    parameters = {n: p for n, p in model.named_parameters() if is_adapter(n)}
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(torch.randn_like(parameter) / 4)
    return model, weight if kind == "linear" else weight.T, parameters


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("dora", [False, True])
def test_a_layer_computes_its_formula(kind, dora):
    config = LoraConfig(r=2, alpha=6, dora=dora)
    model, weight, parameters = adapted(config, kind)
    low = next(p for p in parameters.values() if p.shape == (2, 6))
    high = next(p for p in parameters.values() if p.shape == (4, 2))
    changed = weight + 6 / 2 * high @ low
    if dora:
        (magnitude,) = (p for p in parameters.values() if p.dim() == 1)
        changed = changed * (magnitude / changed.norm(dim=1))[:, None]
    x = torch.randn(5, 6)
    torch.testing.assert_close(model[0](x), x @ changed.T + model[0].bias)
    merged = plain_copy(model, merged=True)
    assert not has_adapters(merged) and has_adapters(model)
    torch.testing.assert_close(merged(x), model(x))
    base = plain_copy(model, merged=False)
    torch.testing.assert_close(base[0](x), x @ weight.T + model[0].bias)
    with without_adapters(model):
        torch.testing.assert_close(model(x), base(x))


def test_only_adapters_are_trained():
    model, _, parameters = adapted(LoraConfig(r=2))
    assert {n for n, p in model.named_parameters() if p.requires_grad} == parameters.keys()
    assert {n for n, _ in model.named_parameters() if is_of_base(n)} == {
        "0.weight", "0.bias", "2.weight", "2.bias"
    }


def test_initial_adapters_depend_on_the_seed_and_change_nothing():
    def lows(seed):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4))
        plain = model(torch.ones(6))
        adapt(model, ["0"], LoraConfig(r=2), seed)
        assert torch.equal(model(torch.ones(6)), plain)
        return torch.cat([p.flatten() for n, p in model.named_parameters() if is_adapter(n)])

    assert torch.equal(lows(1), lows(1)) and not torch.equal(lows(1), lows(2))


def test_dropout_can_be_disabled():
    model, _, _ = adapted(LoraConfig(r=2, dropout=0.5))
    x = torch.randn(64, 6)
    assert not torch.equal(model(x), model(x))
    disable_dropout(model)
    assert torch.equal(model(x), model(x))


def test_a_shared_weight_is_not_quantised():
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model[1].weight = model[0].weight
    with pytest.raises(ModelError, match="'0' shares its weight with '1'"):
        adapt(model, ["0"], LoraConfig(base="int8"), 0)
