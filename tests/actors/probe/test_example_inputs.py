"""Trial inputs of encoders: guessed from configs and signatures, or required from the user."""

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.parakeet.modeling_parakeet import ParakeetEncoder
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.siglip2.modeling_siglip2 import Siglip2VisionModel
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from raymm.actors.probe import small_model as small_model_file
from raymm.actors.probe.cut import encoder_inputs, probe_encoder
from raymm.actors.probe.small_model import small_model
from raymm.actors.weights.source import ConfigSource, LiveSource
from raymm.config.model_section import example_tensors
from raymm.config.sections import parse_config
from raymm.errors import ConfigError, ProbeError

SMALL = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)
WHISPER = dict(
    d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=16, decoder_layers=2,
    decoder_attention_heads=2, decoder_ffn_dim=16, max_source_positions=20, vocab_size=32,
    pad_token_id=0,
)


@pytest.mark.parametrize("module, config, shapes", [
    (hf.SiglipVisionModel, dict(**SMALL, image_size=32), {"pixel_values": (1, 3, 32, 32)}),
    (hf.VideoMAEModel, dict(**SMALL, image_size=32, num_frames=4),
     {"pixel_values": (1, 4, 3, 32, 32)}),
    (hf.ASTModel, dict(**SMALL, max_length=128), {"input_values": (1, 128, 128)}),
    (hf.Wav2Vec2Model, dict(**SMALL, conv_dim=(8,) * 7, num_conv_pos_embedding_groups=2),
     {"input_values": (1, 16000)}),
    (WhisperEncoder, WHISPER, {"input_features": (1, 80, 40)}),
    (ParakeetEncoder, SMALL, {"input_features": (1, 200, 80)}),
    (PixtralVisionModel, dict(**SMALL, image_size=32),
     {"pixel_values": (1, 3, 32, 32), "image_sizes": (1, 2)}),
    (Siglip2VisionModel, dict(**SMALL, num_patches=16),
     {"pixel_values": (1, 16, 768), "spatial_shapes": (1, 2), "pixel_attention_mask": (1, 16)}),
    (Qwen2_5_VisionTransformerPretrainedModel,
     dict(depth=2, hidden_size=16, out_hidden_size=16, num_heads=2, intermediate_size=16),
     {"hidden_states": (64, 1176), "grid_thw": (1, 3)}),
])  # fmt: skip
def test_guessed_inputs_are_those_that_run(module, config, shapes):
    model = small_model(ConfigSource(module, module.config_class(**config)))
    found = encoder_inputs(model, None)
    assert {name: tuple(value.shape) for name, value in found.items()} == shapes


def test_an_encoder_with_a_decoder_names_the_encoder():
    model = small_model(ConfigSource(hf.WhisperModel, hf.WhisperConfig(**WHISPER)))
    with pytest.raises(ProbeError, match="WhisperModel .*model_class 'WhisperEncoder'"):
        encoder_inputs(model, None)


def test_unsupported_encoder_inputs_are_reported():
    config = hf.SiglipVisionConfig(**SMALL, image_size=32)
    model = small_model(ConfigSource(hf.SiglipVisionModel, config))
    with pytest.raises(ProbeError, match=r"SiglipVisionModel does not accept pixel_values "
                       r"\(1, 3, 48, 48\) float32 from example_inputs \(\w+Error: .*give inputs"):
        encoder_inputs(model, {"pixel_values": torch.zeros(1, 3, 48, 48)})
    with pytest.raises(ProbeError, match="cannot guess inputs named 'input' for Linear"):
        encoder_inputs(small_model(LiveSource.of(nn.Linear(2, 2))), None)


# A pixel shuffle concatenates four neighbours: as wide as the feed-forward, or it fails.
SHUFFLED = dict(
    hidden_size=48, intermediate_size=192, num_attention_heads=4, num_hidden_layers=4,
    image_size=16, patch_size=4, projector_input_dim=32, projector_output_dim=32,
    vision_output_dim=32,
)  # fmt: skip


def test_an_encoder_too_small_to_run_is_tried_wider(monkeypatch):
    source = ConfigSource(hf.Llama4VisionModel, hf.Llama4VisionConfig(**SHUFFLED))
    inputs = {"pixel_values": torch.randn(1, 3, 16, 16)}
    with pytest.raises(ProbeError, match="does not accept"):
        encoder_inputs(small_model(source), inputs)
    assert probe_encoder(source, inputs).blocks == "model.layers"
    odd = {"pixel_values": torch.randn(1, 5, 16, 16)}
    with pytest.raises(ProbeError, match=r"48x48\)\); give inputs as a batch has them for"):
        probe_encoder(source, odd)
    monkeypatch.setattr(small_model_file, "_MOST_PARAMETERS", 0)
    with pytest.raises(ProbeError, match=r"does not accept.*full size, [\d,]+ parameters, it"):
        probe_encoder(source, odd)


def configuration(**example):
    return {
        "run": {"storage_path": "x", "steps": 1},
        "model": {
            "language_model": {"path": "llm"},
            "encoders": {"vision": {"path": "x", "example_inputs": {"pixels": example}}},
        },
        "data": {"train": "x.jsonl", "tokenizer": "llm", "batch_size": 1, "microbatches": 1},
    }


def test_a_configuration_gives_example_inputs():
    section = parse_config(configuration(shape=[1, 3, 4, 4])).model.encoders["vision"]
    tensors = example_tensors(section.example_inputs)
    assert tensors["pixels"].shape == (1, 3, 4, 4) and tensors["pixels"].std() > 0
    section = parse_config(configuration(values=[[1, 2]], dtype="int64")).model.encoders["vision"]
    assert example_tensors(section.example_inputs)["pixels"].tolist() == [[1, 2]]


@pytest.mark.parametrize("wrong", [
    {}, {"shape": [1], "values": [1]}, {"shape": [0]}, {"shape": [10**9]},
    {"values": [[1], [2, 3]]}, {"shape": [1], "dtype": "complex64"},
])  # fmt: skip
def test_wrong_example_inputs_are_named(wrong):
    with pytest.raises(ConfigError, match="model.encoders.vision.example_inputs.pixels"):
        parse_config(configuration(**wrong))
