"""Probe of expert parallelism."""

import pytest
import transformers as hf

from raymm.actors.probe.experts.parallel import probe_experts
from raymm.actors.weights.source import ConfigSource
from raymm.errors import ProbeError

WIDTH = 8


SIZES = dict(
    hidden_size=WIDTH, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=4, vocab_size=16, num_experts_per_tok=2,
)  # fmt: skip


def test_models_without_enough_experts_are_refused():
    config = hf.MixtralConfig(**SIZES, num_local_experts=3)
    found = probe_experts(ConfigSource(hf.MixtralForCausalLM, config), 3, "llm")
    assert found == ("model.layers.0.mlp.experts",)
    with pytest.raises(ProbeError, match="ep of 'llm' is 4, but .* has 3 experts; accepted: 1"):
        probe_experts(ConfigSource(hf.MixtralForCausalLM, config), 4, "llm")
    sizes = {name: value for name, value in SIZES.items() if "expert" not in name}
    llama = ConfigSource(hf.LlamaForCausalLM, hf.LlamaConfig(**sizes))
    with pytest.raises(ProbeError, match="LlamaForCausalLM has no experts"):
        probe_experts(llama, 2, "llm")
