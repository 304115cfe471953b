"""Runs with adapters: checkpoints, resumption, and folders for stock ``peft``."""

import shutil

import peft
import pytest
import torch
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, SiglipVisionModel, TorchAoConfig

from raymm.actors.adapters.lora import is_adapter
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from tests.support.tiny_run import checkpoint_tensors, curve

LLM = "model.language_model"
LORA = {"lora": {"r": 2, "alpha": 4, "dropout": 0.1}}


@pytest.fixture
def changes(inputs):
    """Return settings: adapters on a language model from a folder, full projector, frozen tower."""
    return {
        f"{LLM}.config": None, f"{LLM}.path": str(inputs / "llama"), f"{LLM}.train": LORA,
        "model.encoders.vision.train": "frozen", "run.steps": 4, "run.keep_checkpoints": 4,
    }


def test_resumption_and_adapter_folders(
    ray_cluster, raymm, changes, inputs, make_config, tmp_path
):
    config, run = make_config(changes), tmp_path / "run"
    assert raymm("train", config)[0] == 0
    names = {n for n in checkpoint_tensors(run) if not n.startswith("optimizer/")}
    assert {n for n in names if not is_adapter(n)} == {
        f"vision/projector.layers.{i}.{leaf}" for i in (0, 2) for leaf in ("weight", "bias")
    }
    assert sum(map(is_adapter, names)) == 2 * 2 * 7  # layers, matrices, targets

    whole = curve(run)
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole
    other = make_config({**changes, f"{LLM}.train": {"lora": {**LORA["lora"], "alpha": 8}}})
    code, text = raymm("train", other)
    assert code == 2 and "model.llm.lora.alpha is 8" in text

    model = build_model(load_config(config))
    load_into_model(model, CheckpointStore(run).latest())
    check_folders(model, raymm, config, inputs, tmp_path)


def check_folders(model, raymm, config, inputs, tmp_path):
    ids = torch.arange(5, 15)[None]
    trained = model.language_model.materialize().eval()
    due = trained(input_ids=ids).logits
    assert raymm("export", config, "--out", str(tmp_path / "out"))[0] == 0
    assert {folder.name for folder in (tmp_path / "out").iterdir()} == {
        "language_model", "vision_encoder", "vision_projector",
    }
    base = AutoModelForCausalLM.from_pretrained(inputs / "llama").eval()
    assert float((base(input_ids=ids).logits - due).norm()) > 1e-3 * float(due.norm())
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out/language_model").eval()
    assert close(loaded(input_ids=ids).logits, due)
    named = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out/language_model").eval()
    assert close(named(input_ids=ids).logits, due)

    assert raymm("export", config, "--out", str(tmp_path / "merged"), "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged/language_model").eval()
    assert close(merged(input_ids=ids).logits, due)


def test_a_quantised_base(ray_cluster, raymm, changes, inputs, make_config, tmp_path):
    """Load the folder with stock ``peft``, as ``torchao`` quantises it and as an ordinary folder.
    """
    lora = {"lora": {"r": 2, "base": "int8"}}
    config = make_config({**changes, f"{LLM}.train": lora, "run.steps": 2})
    assert raymm("train", config)[0] == 0
    names = {n for n in checkpoint_tensors(tmp_path / "run") if n.startswith("llm/")}
    assert names and all(map(is_adapter, names))
    model = build_model(load_config(config))
    load_into_model(model, CheckpointStore(tmp_path / "run").latest())
    ids = torch.arange(5, 15)[None]
    trained = model.language_model.materialize().eval()
    due = trained(input_ids=ids).logits
    for flags in ((), ("--merge",)):
        out = tmp_path / ("merged" if flags else "out")
        assert raymm("export", config, "--out", str(out), *flags)[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged/language_model").eval()
    assert close(merged(input_ids=ids).logits, due)
    base = AutoModelForCausalLM.from_pretrained(
        inputs / "llama", quantization_config=TorchAoConfig(Int8WeightOnlyConfig())
    ).eval()
    assert "Int8" in type(base.model.layers[0].mlp.up_proj.weight).__name__
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out/language_model").eval()
    assert close(loaded(input_ids=ids).logits, due)


def close(actual, expected):
    return float((actual - expected).norm()) <= 1e-5 * float(expected.norm())


def test_a_base_from_config_values_is_exported(
    ray_cluster, raymm, changes, make_config, tmp_path
):
    """Use a tower from config values with DoRA on some layers, and a fully trained language model.
    """
    lora = {"lora": {"r": 2, "targets": ["q_proj", "fc1"], "dora": True}}
    tower = {"model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24,
             "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    vision = "model.encoders.vision"
    config = make_config({
        **changes, f"{LLM}.train": "full", f"{vision}.path": None, f"{vision}.config": tower,
        f"{vision}.train": lora, "run.steps": 2,
    })
    assert raymm("train", config)[0] == 0
    assert raymm("export", config, "--out", str(tmp_path / "out"))[0] == 0
    model = build_model(load_config(config))
    load_into_model(model, CheckpointStore(tmp_path / "run").latest())
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    due = model.encoders["vision"].materialize().eval()(pixel_values=images).last_hidden_state
    base = SiglipVisionModel.from_pretrained(tmp_path / "out/vision_encoder_base")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out/vision_encoder").eval()
    assert close(loaded(pixel_values=images).last_hidden_state, due)
