"""Options of parallel modules: declared once, with the same errors everywhere."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig

from raymm.actors.rank.rank_resources import RankResources
from raymm.errors import ClusterError, ModelError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.parallel_model import ParallelModel, check_head_dims
from raymm.runtime.specs import MultimodalParallelSpec


def test_options_are_refused_by_name_before_anything_else():
    with pytest.raises(TypeError, match="'sed' is not an option .* accepted: .*seed, timeout_s"):
        ParallelModel(None, None, sed=1)
    with pytest.raises(ValueError, match="device is 'tpu'; accepted: cpu, cuda"):
        ParallelModel(None, None, device="tpu")


@pytest.mark.parametrize("gpus", [0.5, 2.0, 0.0])
def test_ranks_on_gpus_have_one_each(gpus):
    with pytest.raises(ClusterError, match=f"gpus is {gpus:g} with device 'cuda'; accepted: 1"):
        ParallelModel(None, None, device="cuda", resources=RankResources(gpus=gpus))


def test_the_environment_of_ranks_is_names_and_texts():
    assert RankResources(env={"NCCL_DEBUG": "INFO"}).env == {"NCCL_DEBUG": "INFO"}
    for env in ({"": "a"}, {"A=B": "c"}, {"A": "\0"}, {"A": 1}):
        with pytest.raises(ClusterError, match="resources.env has"):
            RankResources(env=env)  # type: ignore[arg-type]


def test_precisions_are_refused_by_name():
    with pytest.raises(ValueError, match="precision is 'fp8'; accepted: auto, fp32, bf16"):
        ParallelModel(None, None, precision="fp8")


@pytest.mark.parametrize("precision, device, autocast", [
    ("auto", "cpu", None), ("auto", "cuda", "bfloat16"),
    ("fp32", "cuda", None), ("bf16", "cpu", "bfloat16"),
])  # fmt: skip
def test_precision_follows_the_device(precision, device, autocast):
    options = RuntimeOptions(precision=precision, device=device)
    assert options.autocast == autocast and options.precision in ("fp32", "bf16")


def test_consequences_of_options():
    options = RuntimeOptions.of({"optimizer": None, "precision": "bf16", "device": "cuda"})
    assert options.optimizer == RuntimeOptions().optimizer
    assert options.autocast == "bfloat16" and RuntimeOptions().autocast is None
    assert options.reserved == RankResources(gpus=1.0)
    assert RuntimeOptions().reserved == RankResources()


def test_kernels_are_refused_by_name():
    with pytest.raises(ValueError, match="kernels is 'flex'; accepted: raymm, raymm_unordered, au"):
        ParallelModel(None, None, kernels="flex")  # type: ignore[arg-type]


def wide_model(mask: str | None) -> MultimodalModule:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_attention_heads=2, num_key_value_heads=1,
        head_dim=520, num_hidden_layers=1, vocab_size=64,
    )  # fmt: skip
    return MultimodalModule(language_model=ModalityModule(config), mask=mask)


def test_unsupported_head_dims_are_refused_early():
    said = "llm: .*self_attn has head dimension 520; accepted on cuda: at most 512"
    model = wide_model("causal")
    with pytest.raises(ModelError, match=said):
        MultimodalParallelSpec().apply(model, device="cuda")
    wide, on_gpus = wide_model("causal"), RuntimeOptions(device="cuda")
    for allowed in (RuntimeOptions(), RuntimeOptions(device="cuda", kernels="auto")):
        check_head_dims(wide, allowed, ["llm"])
    check_head_dims(wide, on_gpus, [])  # its own attention is used
    with pytest.raises(ModelError, match=said):
        check_head_dims(wide_model(None), on_gpus, {"llm"})
