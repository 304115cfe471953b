"""Live modules with parametrized weights: their runs resume, and are exported."""

import shutil

import pytest
import torch
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
from transformers import (
    LlamaConfig,
    SiglipVisionConfig,
    SiglipVisionModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

import raymm as public
from raymm.actors.weights.parametrized import has_parametrizations, with_weights_of_its_class
from raymm.storage.export import export_model
from tests.support.tiny_run import LLAMA, SIGLIP, curve, remove_checkpoints

PIPELINE = {"language_model": {"pp": 2, "ranks": [0, 1]}, "encoders": {"vision": {"ranks": [0]}}}
STAGES = {"language_model": {"ranks": [0]}, "encoders": {"vision": {"pp": 2, "ranks": [0, 1]}}}


def model():
    """Return a live SigLIP in which each layer of a block has another normalization."""
    torch.manual_seed(0)
    vision = SiglipVisionModel(SiglipVisionConfig(**without_type(SIGLIP)))
    for block in vision.encoder.layers:
        parametrizations.weight_norm(block.mlp.fc1)
        parametrizations.spectral_norm(block.mlp.fc2)
        parametrizations.orthogonal(block.self_attn.q_proj)
        weight_norm(block.self_attn.k_proj)
        spectral_norm(block.self_attn.v_proj)
    return public.MultimodalModule(
        {"vision": public.ModalityModule(vision, "mlp")}, LlamaConfig(**without_type(LLAMA))
    )


def without_type(values):
    return {name: value for name, value in values.items() if name != "model_type"}


def batches(count):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 20, (count, 2, 6), generator=generator)
    pixels = torch.randn(count, 2, 3, 8, 8, generator=generator)
    return [
        {"input_ids": one, "labels": one, "vision": {"pixel_values": images}}
        for one, images in zip(ids, pixels, strict=True)
    ]


def train(folder, steps, layout):
    spec = public.MultimodalParallelSpec(
        language_model_spec=public.ParallelSpec(**layout["language_model"]),
        encoder_specs={"vision": public.ParallelSpec(**layout["encoders"]["vision"])},
    )
    run = public.RunConfig(
        storage_path=str(folder), steps=steps, checkpoint_every=2, device="cpu"
    )
    return public.Trainer(
        model(), spec, batches(4), run, optimizer=public.OptimizerConfig(lr=1e-2, total_steps=4),
        resources=public.RankResources(cpus=0.25),
    ).fit()


def test_a_parametrized_run_resumes_and_is_exported(tmp_path, ray_cluster):
    train(tmp_path / "run", 4, PIPELINE)
    whole = curve(tmp_path / "run")
    remove_checkpoints(tmp_path / "run", after=2)
    shutil.copytree(tmp_path / "run", tmp_path / "other")
    train(tmp_path / "run", 4, PIPELINE)
    assert curve(tmp_path / "run") == whole
    train(tmp_path / "other", 4, STAGES)
    for row, due in zip(curve(tmp_path / "other"), whole, strict=True):
        assert row[1:3] == pytest.approx(due[1:3], rel=1e-4)

    trained = model()
    export_model(trained, str(tmp_path / "run"), str(tmp_path / "out"))
    again, loading = SiglipVisionModel.from_pretrained(
        tmp_path / "out" / "vision_encoder", output_loading_info=True
    )
    assert not loading["missing_keys"] and not loading["unexpected_keys"]
    inputs = batches(1)[0]["vision"]
    encoder = trained.encoders["vision"].module.eval()
    assert has_parametrizations(encoder)  # the user's module is unchanged
    due = encoder(**inputs).last_hidden_state
    assert torch.allclose(again.eval()(**inputs).last_hidden_state, due, atol=1e-5)


def test_weights_computed_by_a_class_stay_computed():
    config = Wav2Vec2Config(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        conv_dim=(8,) * 7, num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8,
    )
    module, plain = Wav2Vec2Model(config), Wav2Vec2Model(config)
    parametrizations.weight_norm(module.encoder.layers[0].feed_forward.output_dense)
    found = with_weights_of_its_class(module, plain)
    assert found.state_dict().keys() == plain.state_dict().keys()
    assert has_parametrizations(found.encoder.pos_conv_embed)
