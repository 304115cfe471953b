"""Adapters on quantised weights equal stock ``peft`` on what ``torchao`` makes of the same."""

from __future__ import annotations

from typing import Any

import parity_models as pm
import pytest
import torch
import torchao.quantization as torchao
from parity_check import OPTIMIZER, check_gradients, check_training
from parity_oracle import Oracle, prepend
from test_adapters import PeftOracle, in_peft, noisy, step

from raymm.actors.adapters.lora import AdaptedLayer
from raymm.actors.adapters.lora_config import AdapterError, LoraConfig
from raymm.actors.adapters.quantised import SCALE, quantise, quantised_product
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from raymm.scheduler.plan.plan_error import PlanError

INT8 = LoraConfig(r=4, alpha=8.0, base="int8")


def model_of(lora: LoraConfig, config: Any = None) -> MultimodalModule:
    config = config or pm.llama(tied=False, layers=4)
    language = noisy(ModalityModule(pm.build(config, 3), lora=lora, seed=7))
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=True)}, language
    )


def torchao_oracle(model: MultimodalModule, config: Any) -> Oracle:
    """The linear layers' weights are the values that ``torchao`` has of them."""
    module: Any = model.language_model.module
    written_out = {name: layer for name, layer in pm.build(config, 3).named_modules()}
    for name, layer in module.named_modules():
        if isinstance(layer, AdaptedLayer):
            theirs: Any = torch.nn.Sequential(torch.nn.Linear(*_widths(layer), bias=False))
            weight = written_out[name].weight.detach()
            theirs[0].weight.data = weight if isinstance(layer, torch.nn.Linear) else weight.T
            torchao.quantize_(theirs, torchao.Int8WeightOnlyConfig())
            values = theirs[0].weight.dequantize()
            assert torch.equal(layer._matrix(), values)
    encoders = {name: (one.module, one.projector) for name, one in model.encoders.items()}
    return PeftOracle(encoders, in_peft(module, model.language_model.lora), prepend, None)


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    return layer.nx, layer.nf


@pytest.mark.parametrize(("lora", "layout", "schedule"), [
    (INT8, {"pp": 2}, "1f1b"), (INT8, {"pp": 2, "tp": 2}, "zero_bubble"),
    (LoraConfig(r=4, dora=True, base="int8"), {"tp": 2, "recompute_layers": "matmuls"}, "1f1b"),
    (INT8, {"dp": 2, "sharding": "zero1"}, "1f1b"), (INT8, {"cp": 2}, "1f1b"),
])
def test_layouts(ray_cluster, lora, layout, schedule):
    config = pm.llama(tied=False, layers=4)
    model = model_of(lora, config)
    oracle = torchao_oracle(model, config)
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(**layout), 2, schedule)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step()]])


def test_transposed_weights(ray_cluster):
    """Of GPT-2."""
    lora = LoraConfig(r=4, targets=("c_fc", "c_proj"), base="int8")
    model = model_of(lora, pm.gpt2())
    oracle = torchao_oracle(model, pm.gpt2())
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(tp=2), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_torchao(dtype):
    """Codes, scales and products, bit by bit; the gradient of the input is that of the values."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 20, bias=False)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4].abs_()
    codes, scales = quantise(linear.weight)
    torchao.quantize_(linear, torchao.Int8WeightOnlyConfig())
    weight: Any = linear.weight
    assert torch.equal(codes, weight.qdata) and torch.equal(scales, weight.scale[:, 0])
    hidden = torch.randn(3, 5, 48, dtype=dtype, requires_grad=True)
    out = quantised_product(hidden, codes, scales)
    assert torch.equal(out, linear(hidden))
    gradient = torch.randn_like(out)
    (own,) = torch.autograd.grad(out, hidden, gradient)
    due = gradient.double() @ (codes.double() * scales.double()[:, None])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert float((own.double() - due).norm()) <= tolerance * float(due.norm())


def test_what_is_refused():
    with pytest.raises(AdapterError, match="base is 'int3'"):
        LoraConfig(base="int3")
    tied = LoraConfig(targets=("lm_head",), base="int8")
    with pytest.raises(AdapterError, match="embed_tokens.*too"):
        ModalityModule(pm.build(pm.llama(tied=True), 3), lora=tied)
    with pytest.raises(PlanError, match="quantised"):
        model = model_of(INT8)
        spec = MultimodalParallelSpec(
            {"vision": ParallelSpec()}, ParallelSpec(dp=2, sharding="fsdp"), 2)
        stage_builders(model, spec.plan(model))


def test_scales_are_frozen():
    module: Any = model_of(INT8).language_model.module
    names = {name: p for name, p in module.named_parameters() if name.endswith(SCALE)}
    assert len(names) == 4 * 7 and not any(p.requires_grad for p in names.values())
    assert all(p.dtype == torch.float32 and p.dim() == 1 for p in names.values())
