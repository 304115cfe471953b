"""VLMs with two stages per tower and language model equal their own forward."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks.shared.family_check import EXACT
from benchmarks.shared.family_classes import Family
from benchmarks.shared.vlm_check import SEVERAL, check, runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.tower import TowerStage
from raymm.model.vlm import from_pretrained

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.cells(5)
@pytest.mark.parametrize(
    "name",
    [
        "Qwen2_5_VLForConditionalGeneration",  # patches of any grid, positions in three dimensions
        "Qwen3VLForConditionalGeneration",  # features of several blocks into several layers
        "Idefics3ForConditionalGeneration",  # images per row, with padding marked by their values
        "GlmAsrForConditionalGeneration",  # audio
        "LlavaForConditionalGeneration",  # features of the second to last block
        "FunAsrNanoForConditionalGeneration",  # a block that is wider than the previous one
        "GraniteSpeechForConditionalGeneration",  # changes a block's output in place
        "MllamaForConditionalGeneration",  # cross attention
        "Qwen2AudioForConditionalGeneration",  # masks that its forward derives from lengths
        "VoxtralRealtimeForConditionalGeneration",  # features that are not a field of its output
        "Qwen2_5OmniThinkerForConditionalGeneration",  # images and audio
        "Mistral4ForCausalLM",  # no tower
    ],
)
def test_a_vlm_in_stages_is_exact(name):
    model = getattr(transformers, name)
    outcome = check(Family(KIND, model, model.config_class))
    assert (outcome.result, outcome.sentence) == (EXACT, SEVERAL if "Omni" in name else "")


def test_a_frozen_tower_with_a_trained_projector_is_in_eval():
    model = transformers.LlavaForConditionalGeneration
    config, batches = runnable(Family(KIND, model, model.config_class))
    config.architectures = [model.__name__]
    features, losses = [], []
    for dropout in (0.0, 0.5):
        config.vision_config.attention_dropout = dropout
        split = from_pretrained(copy.deepcopy(config), batches[0], {"vision": "frozen"}, seed=1)
        spec = split.tower_spec("vision")
        stage = TowerStage.build(spec, 0, spec.num_blocks)
        assert any(p.requires_grad for p in stage.parameters())  # of the projector
        message = stage.run(split.tower("vision").inputs(batches[0]), {}, MicrobatchContext(1))
        features.append(message.tensors[0])
        losses.append(split.loss(batches))
        assert split.materialize().training
    assert torch.equal(*features)
    assert torch.equal(*losses)


TEXT = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
CONVOLUTIONS = {
    "model_type": "efficientnet", "width_coefficient": 0.25, "depth_coefficient": 0.5,
    "hidden_dim": 320, "hidden_size": 320, "image_size": 64, "drop_connect_rate": 0.0,
}  # fmt: skip
MERGED_PATCHES = {
    "model_type": "swin", "image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1],
    "num_heads": [1, 2], "window_size": 4, "hidden_size": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    "name, vision, image, tokens",
    [("FastVlm", CONVOLUTIONS, 64, 4), ("Llava", MERGED_PATCHES, 32, 16)],
)
def test_towers_with_blocks_of_other_shapes_are_accepted(name, vision, image, tokens):
    config = getattr(transformers, f"{name}Config")(
        vision_config=vision, text_config=TEXT, image_token_index=60,
        vision_feature_layer=-1, vision_feature_select_strategy="full",
    )
    config.architectures = [f"{name}ForConditionalGeneration"]
    ids = torch.tensor([[1, *[60] * tokens, 5, 6]])
    batch = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.randn(1, 3, image, image),
    }  # fmt: skip
    split = from_pretrained(config, batch, {"vision": "frozen"}, seed=1)
    spec, whole = split.tower_spec("vision"), split.materialize().eval()
    stage = TowerStage.build(spec, 0, spec.num_blocks)
    message = stage.run(split.tower("vision").inputs(batch), {}, MicrobatchContext(1))
    due = whole.model.get_image_features(batch["pixel_values"]).pooler_output
    parts = [due] if isinstance(due, torch.Tensor) else due  # one per image
    assert len(parts) == 1
    assert any(torch.equal(tensor, parts[0]) for tensor in message.tensors)


def test_no_code_depends_on_a_model_name():
    names = {"".join(filter(str.isalnum, name)) for name in transformers.CONFIG_MAPPING}
    asked = re.compile(r"(?:if|==|in) .*[\"']([a-z0-9_.-]{4,})[\"']")
    usual = {"bert", "text", "vision", "audio", "switch", "data2vec", "time"}
    found = [
        (path.name, line.strip())
        for package in ("actors", "raymm", "kernels", "scheduler")
        for path in (ROOT / package).rglob("*.py")
        if "model_type" in (source := path.read_text())
        for line in source.splitlines()
        if "model_type" in line and (match := asked.search(line))
        and match[1] in names - usual
    ]  # fmt: skip
    assert not found
