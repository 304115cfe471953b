"""Adapter folders, read by stock ``peft``."""

import json

import peft
import pytest
import torch
import transformers

from raymm.actors.adapters.lora import adapt, is_adapter, plain_copy
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.errors import ModelError
from raymm.storage.export import save_adapters

RANKS = {"q_proj": 4, "up_proj": 6}


def llama() -> torch.nn.Module:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).eval()


def adapted(**use_rslora: bool) -> torch.nn.Module:
    """Return a model with trained adapters; the scaling of each kind of layer is as specified."""
    model = llama()
    names = [name for name, _ in model.named_modules()]
    for kind, value in use_rslora.items():
        targets = [name for name in names if name.endswith(kind)]
        adapt(model, targets, LoraConfig(r=RANKS[kind], alpha=8.0, use_rslora=value), 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.normal_()
    return model


@pytest.mark.parametrize("up_proj", [False, True])
@pytest.mark.parametrize("q_proj", [False, True])
def test_peft_computes_the_same_with_either_scaling(tmp_path, q_proj, up_proj):
    model, ids = adapted(q_proj=q_proj, up_proj=up_proj), torch.arange(10)[None]
    due = model(ids).logits
    folder = tmp_path / "adapters"
    save_adapters(model, folder, None, causal=True)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert written["use_rslora"] is q_proj  # of the first layer
    theirs = peft.PeftModel.from_pretrained(llama(), folder).eval()
    torch.testing.assert_close(theirs(ids).logits, due, rtol=1e-5, atol=1e-5)
    merged = plain_copy(model, merged=True)
    torch.testing.assert_close(merged(ids).logits, due, rtol=1e-4, atol=1e-4)
    assert not due.allclose(llama()(ids).logits, atol=1e-2)


@pytest.mark.parametrize("r", [1, 3, 8, 64])
def test_scaling_is_that_of_peft(r):
    for use_rslora in (False, True):
        config = peft.LoraConfig(
            r=r, lora_alpha=8, use_rslora=use_rslora, target_modules=["q_proj"]
        )
        theirs = peft.get_peft_model(llama(), config)
        layer = theirs.base_model.model.model.layers[0].self_attn.q_proj
        mine = LoraConfig(r=r, alpha=8.0, use_rslora=use_rslora)
        assert mine.scaling == layer.scaling["default"]


def test_a_non_boolean_value_is_rejected():
    with pytest.raises(ModelError, match="use_rslora is 1; accepted: true"):
        LoraConfig(use_rslora=1)
