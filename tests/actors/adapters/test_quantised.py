"""Adapters on quantised weights equal stock ``peft`` on ``torchao``'s weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchao.quantization as torchao
from hypothesis import given
from hypothesis import strategies as st
from torchao.quantization.granularity import PerGroup

from raymm.actors.adapters.lora import (
    AdaptedLayer,
    AdaptedLinear,
    plain_copy,
    without_adapters,
)
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.adapters.quantised import GROUP, SCALE, dequantised, quantise, quantised_product
from raymm.errors import ModelError, PlanError
from raymm.layout.stage_builders import stage_builders
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.actors.adapters.test_lora import PeftOracle, in_peft, noisy, step
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, check_gradients, check_training
from tests.support.parity_oracle import Oracle, prepend

INT8 = LoraConfig(r=4, alpha=8.0, base="int8")
INT4 = LoraConfig(r=4, alpha=8.0, base="int4")
INT4_OF_TORCHAO = torchao.IntxWeightOnlyConfig(torch.int4, PerGroup(32))


def model_of(lora: LoraConfig, config: Any = None) -> MultimodalModule:
    config = config or pm.llama(tied=False, layers=4)
    language = noisy(ModalityModule(pm.build(config, 3), lora=lora, seed=7))
    return MultimodalModule(
        {"vision": ModalityModule(pm.build(pm.siglip(), 1), "mlp", frozen=True)}, language
    )


def torchao_oracle(model: MultimodalModule, config: Any) -> Oracle:
    """Return an oracle whose linear layers have the values of ``torchao``."""
    module: Any = model.language_model.module
    written_out = {name: layer for name, layer in pm.build(config, 3).named_modules()}
    for name, layer in module.named_modules():
        if isinstance(layer, AdaptedLayer):
            theirs: Any = torch.nn.Sequential(torch.nn.Linear(*_widths(layer), bias=False))
            weight = written_out[name].weight.detach()
            theirs[0].weight.data = weight if isinstance(layer, torch.nn.Linear) else weight.T
            int4 = layer.lora.base == "int4"
            torchao.quantize_(theirs, INT4_OF_TORCHAO if int4 else torchao.Int8WeightOnlyConfig())
            values = theirs[0].weight.dequantize()
            assert torch.equal(layer._matrix(), values)
    encoders = {name: (one.module, one.projector) for name, one in model.encoders.items()}
    return PeftOracle(encoders, in_peft(module, model.language_model.lora), prepend, None)


def _widths(layer: Any) -> tuple[int, int]:
    if isinstance(layer, torch.nn.Linear):
        return layer.in_features, layer.out_features
    return layer.nx, layer.nf


@pytest.mark.cells(1)
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


def wide(config: Any) -> Any:
    """Return a config with widths that tp 2 splits into whole groups of 32 inputs."""
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 128, 16
    return config


@pytest.mark.cells(1)
@pytest.mark.parametrize(("lora", "layout", "schedule"), [
    (INT4, {"pp": 2, "tp": 2}, "zero_bubble"), (INT4, {"dp": 2, "sharding": "zero1"}, "1f1b"),
    (LoraConfig(r=4, dora=True, base="int4"), {"tp": 2, "recompute_layers": "matmuls"}, "1f1b"),
])  # fmt: skip
def test_layouts_of_int4(ray_cluster, lora, layout, schedule):
    config = wide(pm.llama(tied=False, layers=4))
    model = model_of(lora, config)
    oracle = torchao_oracle(model, config)
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(**layout), 2, schedule)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())
        check_training(parallel, oracle, [[step()], [step()[::-1]], [step()]])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(0, 99))
def test_int4_values_equal_torchao(out, groups, seed):
    """Store half a byte each; products and the input gradient are those of the values."""
    torch.manual_seed(seed)
    linear = torch.nn.Linear(32 * groups, out, bias=False)
    with torch.no_grad():
        linear.weight[0, :32] = 0 if seed % 2 else linear.weight[0, :32].abs()
    codes, scales = quantise(linear.weight, "int4")
    assert codes.nbytes * 2 == linear.weight.numel() and scales.shape == (out, groups)
    torchao.quantize_(linear, INT4_OF_TORCHAO)
    values = linear.weight.dequantize()  # type: ignore[operator]
    assert torch.equal(dequantised(codes, scales), values)
    hidden = torch.randn(3, 32 * groups, requires_grad=True)
    product = quantised_product(hidden, codes, scales)
    torch.testing.assert_close(product, hidden @ values.T)
    (gradient,) = torch.autograd.grad(product.sum(), hidden)
    torch.testing.assert_close(gradient, values.sum(0).expand(3, -1))
    meta = quantise(linear.weight.dequantize().to("meta"), "int4")  # type: ignore[operator]
    assert [tensor.shape for tensor in meta] == [codes.shape, scales.shape]


@pytest.mark.cells(1)
@pytest.mark.parametrize("lora", [
    LoraConfig(r=4, targets=("c_fc", "c_proj"), base=base) for base in ("int8", "int4")
], ids=lambda lora: lora.base)  # fmt: skip
def test_transposed_weights(ray_cluster, lora):
    """Use GPT-2."""
    config = pm.gpt2()
    config.n_embd = 64
    model = model_of(lora, config)
    oracle = torchao_oracle(model, config)
    spec = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(tp=2), 2)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        check_gradients(parallel, oracle, step())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantised_values_equal_torchao(dtype):
    """Compare codes, scales and products bit by bit; the input gradient is that of the values."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 20, bias=False)
    with torch.no_grad():
        linear.weight[3] = 0
        linear.weight[4].abs_()
    codes, scales = quantise(linear.weight, "int8")
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
    with pytest.raises(ModelError, match="base is 'int3'"):
        LoraConfig(base="int3")
    with pytest.raises(ModelError, match="down_proj' has 48 inputs; .* multiple of 32"):
        model_of(INT4)
    within = MultimodalParallelSpec({"vision": ParallelSpec()}, ParallelSpec(tp=4), 2)
    with pytest.raises(PlanError, match="a split between 32 inputs that share a scale"):
        whole = model_of(INT4, wide(pm.llama(tied=False, layers=4)))
        stage_builders(whole, within.plan(whole))
    tied = LoraConfig(targets=("lm_head",), base="int8")
    with pytest.raises(ModelError, match="lm_head.*embed_tokens"):
        ModalityModule(pm.build(pm.llama(tied=True), 3), lora=tied)
    with pytest.raises(PlanError, match="quantised"):
        model = model_of(INT8)
        spec = MultimodalParallelSpec(
            {"vision": ParallelSpec()}, ParallelSpec(dp=2, sharding="fsdp"), 2)
        stage_builders(model, spec.plan(model))


def test_int4_is_exported_with_and_without_adapters():
    """Write an ordinary model."""
    module: Any = model_of(INT4, wide(pm.llama(tied=False, layers=4))).language_model.module
    ids = torch.arange(10)[None]
    merged, plain = plain_copy(module.eval(), merged=True), plain_copy(module, merged=False)
    torch.testing.assert_close(merged(input_ids=ids).logits, module(input_ids=ids).logits)
    with without_adapters(module):
        due = module(input_ids=ids).logits
    torch.testing.assert_close(plain(input_ids=ids).logits, due)
    assert not torch.allclose(due, merged(input_ids=ids).logits)
    assert {type(layer) for layer in plain.modules()}.isdisjoint({AdaptedLinear})


def test_scales_are_frozen():
    module: Any = model_of(INT8).language_model.module
    names = {name: p for name, p in module.named_parameters() if name.endswith(SCALE)}
    assert len(names) == 4 * 7 and not any(p.requires_grad for p in names.values())
    assert all(p.dtype == torch.float32 and p.dim() == 1 for p in names.values())


@pytest.mark.parametrize("base", ["int8", "int4"])
def test_products_and_gradients_are_those_of_the_values(base):
    torch.manual_seed(0)
    codes, scales = quantise(torch.randn(5, GROUP), base)
    hidden = torch.randn(3, GROUP, requires_grad=True)
    copied = hidden.detach().clone().requires_grad_()
    output, expected = quantised_product(hidden, codes, scales), copied @ dequantised(
        codes, scales
    ).T
    torch.testing.assert_close(output, expected)
    output.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(hidden.grad, copied.grad)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert quantised_product(hidden, codes, scales).dtype == torch.bfloat16
