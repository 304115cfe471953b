"""Random numbers do not depend on where a module is cut, nor do blocks that a forward skips."""

import pytest
import torch
import transformers as hf
from stages_in_process import StagesInProcess, reference

from raymm.model import ModalityModule, MultimodalModule
from raymm.specs import MultimodalParallelSpec, ParallelSpec

SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def llm(**options):
    config = hf.LlamaConfig(
        **SMALL, num_hidden_layers=2, num_key_value_heads=2, vocab_size=32, **options
    )
    return hf.LlamaForCausalLM(config)


def speech(config_class, layers, **options):
    return config_class(
        **SMALL, num_hidden_layers=layers, conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(5, 2),
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8, mask_time_length=2,
        num_feat_extract_layers=2, **options,
    )


def steps(key, shape, microbatches, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def batch():
        ids = torch.randint(1, 32, (2, 6), generator=generator)
        return {"input_ids": ids, "labels": ids.clone(),
                "tower": {key: torch.randn(2, *shape, generator=generator)}}

    return [batch() for _ in range(microbatches)]


def bit_errors(mine, due):
    """What differs in any bit."""
    assert mine.keys() == due.keys()
    return [
        name for name, gradient in due.items()
        if (gradient is None) != (mine[name] is None)
        or gradient is not None and not torch.equal(gradient, mine[name])
    ]


def compare(model, step, pp, **spec):
    loss, gradients = reference(model, step)
    layout = MultimodalParallelSpec(
        {"tower": ParallelSpec(pp=pp)}, ParallelSpec(pp=2), len(step), **spec
    )
    stages = StagesInProcess(model, layout.plan(model))
    assert stages.run(step) == loss
    assert bit_errors(stages.gradients(), gradients) == []
    return stages


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("config", [hf.Wav2Vec2Config, hf.HubertConfig])
def test_layer_drop(config, pp):
    torch.manual_seed(0)
    tower = hf.AutoModel.from_config(speech(config, 4, layerdrop=0.4))
    model = MultimodalModule({"tower": ModalityModule(tower, "mlp", frozen=False)}, llm())
    compare(model, steps("input_values", (400,), 12), pp)
