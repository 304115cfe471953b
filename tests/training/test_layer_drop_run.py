"""``raymm train`` with an encoder that uses layer drop."""

import math

import pytest
import torch
from transformers import Wav2Vec2Config, Wav2Vec2Model

from tests.support.tiny_run import curve


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


def test_a_cut_encoder_with_layer_drop_equals_an_uncut_one(
    make_config, raymm, speech, tmp_path, ray_cluster
):
    """Check that dropout, dropped layers and masked frames are identical, also in replicas.

    A replica may have a gradient where another has none; only the order of sums over ranks differs.
    """
    layouts = {"whole": {"ranks": [0]}, "cut": {"pp": 2, "dp": 2, "sharding": "zero1"}}
    curves = {}
    for name, layout in layouts.items():
        changes = {
            "run.storage_path": str(tmp_path / name), "run.steps": 5, "run.checkpoint_every": 5,
            "model.encoders.vision.path": speech, "parallel.encoders.vision": layout,
            "data.modalities.vision.processor": "tests.support.run_processors:sound",
        }
        code, text = raymm("train", make_config(changes, f"{name}.yaml"))
        assert code == 0, text
        curves[name] = curve(tmp_path / name)
    due = curves.pop("whole")
    assert len(due) == 5 and all(math.isfinite(value) for row in due for value in row)
    for steps in curves.values():
        for mine, expected in zip(steps, due, strict=True):
            assert mine == pytest.approx(expected, rel=1e-4)
