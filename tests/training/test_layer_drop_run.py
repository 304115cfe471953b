"""``raymm train`` with an encoder from a folder that leaves out blocks in training."""

import math

import pytest
import torch
from tiny_run import curve
from transformers import Wav2Vec2Config, Wav2Vec2Model


@pytest.fixture
def speech(tmp_path) -> str:
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16, intermediate_size=16, num_attention_heads=2, num_hidden_layers=4,
        conv_dim=(8, 8), conv_kernel=(10, 3), conv_stride=(20, 8), num_feat_extract_layers=2,
        num_conv_pos_embedding_groups=2, num_conv_pos_embeddings=8, layerdrop=0.3,
        mask_time_length=2,
    )
    Wav2Vec2Model(config).save_pretrained(tmp_path / "speech")
    return str(tmp_path / "speech")


def test_a_cut_encoder_with_layer_drop_trains_as_an_uncut_one(
    make_config, raymm, speech, tmp_path, ray_cluster
):
    """Dropout, layers left out and masked frames are the same; what differs is the order in which
    two ranks add up the gradient's norm."""
    curves = []
    for pp in (1, 2):
        changes = {
            "run.storage_path": str(tmp_path / f"run-{pp}"), "run.checkpoint_every": 12,
            "model.encoders.vision.path": speech,
            "parallel.encoders.vision": {"pp": pp, "ranks": list(range(pp))},
            "data.modalities.vision.processor": "run_processors:sound",
        }
        code, text = raymm("train", make_config(changes, f"config-{pp}.yaml"))
        assert code == 0, text
        curves.append(curve(tmp_path / f"run-{pp}"))
    whole, cut = curves
    assert len(cut) == 12 and all(math.isfinite(value) for row in cut for value in row)
    for mine, due in zip(cut, whole, strict=True):
        assert mine == pytest.approx(due, rel=1e-5)
