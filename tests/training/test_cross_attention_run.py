"""``raymm train`` with a language model whose layers attend to images.

There are two stages with such a layer, each with two processes that shard text and visual tokens.
"""

import math

import pytest

from tests.support.tiny_run import LLAMA, curve

MLLAMA = {
    "model_type": "mllama_text_model", "vocab_size": LLAMA["vocab_size"], "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "cross_attention_layers": [1, 3], "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def test_two_stages_of_two_processes_train_as_one(make_config, raymm, tmp_path, ray_cluster):
    curves = {}
    for name, layout in {"one": {}, "shared": {"pp": 2, "cp": 2}}.items():
        changes = {
            "run.storage_path": str(tmp_path / name), "run.steps": 4, "run.checkpoint_every": 4,
            "model.language_model": {"config": MLLAMA, "model_class": "MllamaForCausalLM"},
            "model.merge": "cross_attention", "parallel": {"language_model": {"pp": 1, **layout}},
        }
        code, text = raymm("train", make_config(changes, f"{name}.yaml"))
        assert code == 0, text
        curves[name] = curve(tmp_path / name)
    assert len(curves["one"]) == 4
    assert all(math.isfinite(value) for row in curves["one"] for value in row)
    for mine, expected in zip(curves["shared"], curves["one"], strict=True):
        assert mine == pytest.approx(expected, rel=1e-4)
