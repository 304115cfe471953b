"""Modules from a folder with a tied head and embedding share one tensor."""

import pytest
import torch
import transformers as hf

from raymm.actors.probe.cut import probe_language_model
from raymm.actors.weights.model_part import PartSource
from raymm.actors.weights.part import Part
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.model.vlm import from_pretrained
from tests.support.tiny_folders import tiny

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tied")
    config = hf.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_attention_heads=2, num_hidden_layers=3,
        vocab_size=32, num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    hf.LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("outside", [True, False])
def test_a_module_has_its_tied_head(folder, outside):
    whole = PretrainedSource(str(folder))
    places = ("model.layers.1",) if outside else ("model.embed_tokens", "model.norm")
    part = PartSource(whole, places, outside).build()
    own = whole.build()
    assert part.lm_head.weight is part.model.embed_tokens.weight
    assert torch.equal(part.lm_head.weight, own.lm_head.weight)
    assert part.lm_head.weight.any()


def test_tied_weights_are_in_the_stages_that_read_them(folder):
    whole = PretrainedSource(str(folder))
    info = probe_language_model(whole)
    first, middle, last = (whole.build(Part(info, n, n + 1)) for n in range(3))
    own = whole.build().lm_head.weight
    assert torch.equal(first.model.embed_tokens.weight, own)
    assert torch.equal(last.lm_head.weight, own)
    assert EMBEDDING not in dict(middle.named_parameters())
    for stage in (first, last):  # one parameter under either name
        assert [n for n, p in stage.named_parameters() if p.shape == own.shape] == [EMBEDDING]


def test_a_whole_models_language_model_gives_its_logits():
    model = hf.Gemma3ForConditionalGeneration.from_pretrained(tiny("gemma3")[0])
    assert model.lm_head.weight is model.model.language_model.embed_tokens.weight
    ids = torch.arange(6)[None] + 200
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    images = torch.full((1, 4), model.config.image_token_id)
    example |= {
        "input_ids": torch.cat([images, ids], 1), "attention_mask": torch.ones(1, 10).long(),
        "pixel_values": torch.randn(1, 3, 56, 56), "token_type_ids": torch.zeros(1, 10).long(),
    }
    example["token_type_ids"][:, :4] = 1
    split = from_pretrained(tiny("gemma3")[0], example)
    part = split.language_spec().source.build().eval()
    with torch.no_grad():
        assert torch.equal(part(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
