"""Plans under which blocks cannot be compiled are refused by name, before anything starts."""

import re

import pytest
from transformers import LlamaConfig, MixtralConfig

from raymm.errors import PlanError
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.options import RuntimeOptions
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec

SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "vocab_size": 64,
}  # fmt: skip


def refusal(spec: MultimodalParallelSpec, config=None, **options) -> str:
    model = MultimodalModule(
        language_model=ModalityModule(config or LlamaConfig(**SIZES)), mask="causal",
        router_loss="ignore",
    )
    with pytest.raises(PlanError) as raised:
        spec.apply(model, compile="blocks", **options)
    return str(raised.value)


@pytest.mark.parametrize("spec, said", [
    (ParallelSpec(tp=2), "'llm' has tp 2; accepted: tp 1, or compile null"),
    (ParallelSpec(cp=2), "'llm' has cp 2; accepted: cp 1, or compile null"),
    (ParallelSpec(dp=2, sharding="fsdp"), "'llm' has fsdp 2; accepted: fsdp 1"),
    (ParallelSpec(recompute_layers="matmuls"),
     "'llm' has recompute_layers 'matmuls', which selects operators .*; accepted: keep or all"),
])  # fmt: skip
def test_degrees_and_recomputation_are_refused(spec, said):
    assert re.search(said, refusal(MultimodalParallelSpec({}, spec, 2)))


def test_schedules_kernels_and_mixtures_are_refused():
    spec = MultimodalParallelSpec({}, ParallelSpec(pp=2), 2, schedule="zero_bubble")
    assert "schedule 'zero_bubble', which splits the backward" in refusal(spec)
    assert "run.kernels 'auto', which measures" in refusal(MultimodalParallelSpec(), kernels="auto")
    config = MixtralConfig(**SIZES, num_local_experts=2)
    said = refusal(MultimodalParallelSpec(), config)
    assert "'llm' is a mixture of experts; accepted: a dense model" in said


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="compile is 'all'; accepted: blocks, or null"):
        RuntimeOptions(compile="all")
