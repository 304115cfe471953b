"""Rotary embeddings whose frequencies depend on the longest text.

In every layout they equal those of a new model that gets the whole microbatch, whatever was
computed before.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama4.modeling_llama4 import Llama4TextRotaryEmbedding
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from raymm.actors.modules.rotary import RotaryState
from raymm.model.modality_module import ModalityModule
from raymm.model.multimodal import MultimodalModule
from raymm.runtime.specs import MultimodalParallelSpec, ParallelSpec
from tests.support import parity_models as pm
from tests.support.parity_check import OPTIMIZER, close
from tests.support.parity_oracle import gradient_errors, label_tokens

TRAINED = 24  # trained positions of the model
# Longer and shorter rows than that, with the longest at any position; the last has one of each.
STEP = [
    pm.batch([40, 9], 4), pm.batch([12, 20], 5), pm.batch([8, 60, 30], 6), pm.batch([30, 5], 7),
]
PARAMETERS = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": TRAINED},
    "longrope": {
        "factor": 2.0, "original_max_position_embeddings": TRAINED,
        "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 3.0, 4.0],
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": TRAINED,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}
CP, FSDP = ParallelSpec(cp=2), ParallelSpec(dp=2, sharding="fsdp")


def config(kind: str, **changes) -> hf.LlamaConfig:
    values = pm.llama(**changes).to_dict()
    values |= {
        "max_position_embeddings": TRAINED,
        "rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **PARAMETERS[kind]},
    }
    return hf.LlamaConfig(**{k: v for k, v in values.items() if k != "model_type"})


def oracle(model: torch.nn.Module, step: list[dict]) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the step's loss and gradients by transformers, with a new model per microbatch."""
    total, gradients = 0.0, {}
    for one in step:
        fresh = type(model)(copy.deepcopy(model.config))
        fresh.load_state_dict(model.state_dict())
        logits = fresh(one["input_ids"], one["attention_mask"], use_cache=False).logits
        labels = one["labels"][:, 1:]
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum")
        loss = loss / label_tokens(step)
        loss.backward()
        total += loss.item()
        for name, parameter in fresh.named_parameters():
            gradients[name] = gradients.get(name, 0) + parameter.grad
    return total, gradients


def check(kind: str, layout: ParallelSpec, packing: bool = False, recompute: bool = False, **more):
    """Compare a step, the same step after other texts, and the other way round."""
    llm = pm.build(config(kind, **more), 3)
    model = MultimodalModule({}, ModalityModule(llm), packing=packing)
    spec = MultimodalParallelSpec({}, layout, len(STEP), recompute=recompute)
    with spec.apply(model, optimizer=OPTIMIZER) as parallel:
        for step in (STEP, STEP[::-1]):
            parallel.zero_grad()
            loss = parallel.execute(step).loss
            expected, gradients = oracle(llm, step)
            assert close(loss, expected)
            due = {f"language_model.module.{name}": value for name, value in gradients.items()}
            assert gradient_errors(parallel.gradients(), due) == []


def test_all_rotary_types_are_covered():
    assert set(PARAMETERS) == set(ROPE_INIT_FUNCTIONS)


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind", PARAMETERS)
@pytest.mark.parametrize(("layout", "packing", "recompute"), [
    (ParallelSpec(pp=2), False, True), (ParallelSpec(pp=2, cp=2), False, False),
    (ParallelSpec(dp=2, tp=2), False, False), (FSDP, True, False), (CP, True, False),
], ids=["pp recompute", "pp cp", "dp tp", "fsdp packing", "cp packing"])  # fmt: skip
def test_layouts(ray_cluster, kind, layout, packing, recompute):
    check(kind, layout, packing, recompute)


ROTARY = {  # plain; one per type of layer; positions in three dimensions; complex numbers
    "llama": (hf.LlamaConfig, LlamaRotaryEmbedding, None),
    "gemma3": (hf.Gemma3TextConfig, Gemma3RotaryEmbedding, "full_attention"),
    "qwen2_vl": (Qwen2VLTextConfig, Qwen2VLRotaryEmbedding, None),
    "llama4": (hf.Llama4TextConfig, Llama4TextRotaryEmbedding, None),
}


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("name", ROTARY)
def test_token_shards_have_the_frequencies_of_the_text(name, kind):
    """Check after longer and shorter texts, too, and that the module is restored."""
    config_class, rotary_class, layer_type = ROTARY[name]
    parameters = {"rope_type": kind, "rope_theta": 100.0, **PARAMETERS[kind]}
    if name == "qwen2_vl":
        parameters["mrope_section"] = [1, 1, 2]
    typed = {"full_attention": parameters, "sliding_attention": parameters}
    made = config_class(
        hidden_size=32, num_attention_heads=4, head_dim=8, num_hidden_layers=6,
        max_position_embeddings=TRAINED, rope_parameters=typed if layer_type else parameters,
    )
    positions, hidden = torch.arange(60)[None], torch.zeros(1, 60, 32)
    if name == "qwen2_vl":
        positions = positions.expand(3, 1, -1)
    arguments = (layer_type,) if layer_type else ()

    def computed(rotary, lo, hi):
        output = rotary(hidden[:, lo:hi], positions[..., lo:hi], *arguments)
        return list(output) if isinstance(output, tuple) else [output]

    module = rotary_class(made)
    state = RotaryState(module)
    for length in (60, 10, 30, 20, 40):
        due = [one[..., 3:7, :] for one in computed(rotary_class(made), 0, length)]
        state.set_longest(length)
        assert all(map(torch.equal, computed(module, 3, 7), due))
        state.set_longest(None)
        fresh = computed(rotary_class(made), 0, length)
        assert all(map(torch.equal, computed(module, 0, length), fresh))
    state.detach()
    assert not state and not module._forward_hooks and not module._forward_pre_hooks
