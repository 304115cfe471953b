"""Analytic profiles: whole models, and the effects of devices and parallel groups on counts."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig, SiglipVisionConfig

from raymm.actors.adapters.lora_config import LoraConfig
from raymm.costs.analytic import ATTENTION_BACKWARD, analytic_layers, analytic_profile
from raymm.costs.layer_count import count_layers
from raymm.costs.load import Load
from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule, module_graph
from raymm.scheduler.costs.devices import find_device
from raymm.scheduler.costs.layer_costs import CostProfile, layer_work

LLAMA = LlamaConfig(
    hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=300,
)
SIGLIP = SiglipVisionConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    image_size=32, patch_size=8,
)
# A device without memory traffic and with full efficiency, for exact comparisons.
IDEAL = replace(find_device("A40"), memory_bandwidth=1e30, efficiency=1.0)


@pytest.fixture(scope="module")
def model() -> MultimodalModule:
    return MultimodalModule({"vision": ModalityModule(SIGLIP, "mlp", frozen=True)}, LLAMA)


@pytest.fixture(scope="module")
def skeleton(model):
    return model.language_spec().source.skeleton()


def test_a_profile_fits_its_graph_and_survives_json(model):
    profile = analytic_profile(model, {"llm": Load(2, 80)}, "A40")
    profile.check(module_graph(model))
    assert profile.tokens == {"vision": 2 * 16, "llm": 160}  # an image per sample, 4x4 patches
    assert (profile.device, profile.dtype, profile.source) == ("A40", "bf16", "analytic")
    again = CostProfile.from_json(profile.to_json())
    assert again == profile
    assert layer_work(module_graph(model), again)["vision"][0].backward == 0


def test_parameter_bytes_are_exact(model):
    profile = analytic_profile(model, {"llm": Load(1, 80)}, "cpu", "fp32")
    model.materialize()
    for name, part in (("vision", model.vision_encoder), ("llm", model.language_model)):
        exact = 4 * sum(p.numel() for p in part.parameters())
        assert sum(layer.parameter_bytes for layer in profile.modules[name]) == exact


def test_weights_under_adapters_have_no_gradients(model):
    """Compare bytes with torch's trainable parameters, and B_w with their products."""
    adapted = MultimodalModule(
        {"vision": ModalityModule(SIGLIP, "mlp", frozen=True)},
        ModalityModule(LLAMA, lora=LoraConfig(r=4)),
    )
    load = Load(1, 80)
    layers = analytic_profile(adapted, {"llm": load}, IDEAL, "bf16").modules["llm"]
    full = analytic_profile(model, {"llm": load}, IDEAL, "bf16").modules["llm"]
    trained = [p for p in adapted.language_model.materialize().parameters() if p.requires_grad]
    assert sum(layer.trained_bytes for layer in layers) == 4 * sum(p.numel() for p in trained)
    low = 2 * 80 * sum(p.numel() for p in trained) / 3 / 149.7e12  # of a layer
    for layer, whole in zip(layers, full, strict=True):
        assert layer.backward_weight == pytest.approx(low)
        assert layer.backward_input == pytest.approx(whole.backward_input + low)
        assert layer.base_bytes == whole.parameter_bytes
        assert CostProfile({}, dtype="bf16").state_bytes(layer, True) == int(
            layer.base_bytes / 2 + layer.trained_bytes * 4.5
        )


def test_the_projector_outputs_the_language_models_width(model):
    layers = analytic_profile(model, {"llm": Load(2, 80)}, "A40").modules["vision"]
    assert len(layers) == 3
    assert layers[1].output_bytes == 2 * 16 * 32 * 4  # a residual stream in fp32
    assert layers[2].output_bytes == 2 * 16 * 64 * 2  # a product in bf16
    assert layers[2].parameter_bytes == 4 * (32 * 64 + 64 + 64 * 64 + 64)


def test_times_are_flops_over_the_rate_where_memory_is_fast(skeleton):
    load = Load(1, 80)
    cost = analytic_layers(skeleton, load, IDEAL, causal=True)[1]
    count = count_layers(skeleton, load, causal=True)[1]
    rate = 149.7e12
    assert cost.forward == pytest.approx((count.matmul_flops + count.attention_flops) / rate)
    assert cost.backward_weight == pytest.approx(count.matmul_flops / rate)
    assert cost.backward_input == pytest.approx(
        (count.matmul_flops + ATTENTION_BACKWARD * count.attention_flops) / rate
    )


def test_times_are_bytes_over_the_bandwidth_where_memory_is_slow(skeleton):
    slow = replace(IDEAL, memory_bandwidth=1e3)
    load = Load(1, 80)
    cost = analytic_layers(skeleton, load, slow, "fp32", causal=True)[1]
    count = count_layers(skeleton, load, causal=True)[1]
    assert cost.forward == pytest.approx(
        4 * (count.weight_elements + count.traffic_elements) / 1e3
    )


def test_a_group_shares_the_work(model):
    loads = {"llm": Load(2, 80), "vision": Load(2, 16)}
    alone = analytic_profile(model, loads, IDEAL)
    group = analytic_profile(model, loads, IDEAL, tp={"llm": 2}, cp={"llm": 2})
    assert group.modules["vision"] == alone.modules["vision"]
    for one, shared in zip(alone.modules["llm"], group.modules["llm"], strict=True):
        assert shared.forward == pytest.approx(one.forward / 4)
        assert shared.activation_bytes == pytest.approx(one.activation_bytes / 4, abs=1)
        assert shared.parameter_bytes == pytest.approx(one.parameter_bytes / 2, abs=1)


def test_bad_requests_are_refused(model):
    with pytest.raises(PlanError, match=r"loads name \['audio'\]; the model's modules are"):
        analytic_profile(model, {"llm": Load(1, 8), "audio": Load(1, 8)}, "A40")
    with pytest.raises(PlanError, match="loads lack 'llm'"):
        analytic_profile(model, {"vision": Load(1, 8)}, "A40")
    with pytest.raises(PlanError, match="tp of 'vision' is 0"):
        analytic_profile(model, {"llm": Load(1, 8)}, "A40", tp=0)
    with pytest.raises(PlanError, match="accepted: A40"):
        analytic_profile(model, {"llm": Load(1, 8)}, "TPU")
    with pytest.raises(PlanError, match="dtype is 'fp16'"):
        analytic_profile(model, {"llm": Load(1, 8)}, "A40", "fp16")
