"""Whole models in towers and a language model of two stages each, against their own forward."""

import copy
import re
from pathlib import Path

import pytest
import torch
import transformers

from benchmarks._family_check import EXACT
from benchmarks._family_classes import Family
from benchmarks._vlm_check import check, runnable
from benchmarks.vlm_matrix import KIND
from raymm.actors.modules.message import MicrobatchContext
from raymm.actors.stages.tower import TowerStage
from raymm.model.whole_model import from_pretrained

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name",
    [
        "LlavaForConditionalGeneration",  # features of the last block but one
        "Qwen2_5_VLForConditionalGeneration",  # patches of any grid, positions in three dimensions
        "Qwen3VLForConditionalGeneration",  # features of several blocks into several layers
        "Idefics3ForConditionalGeneration",  # images per row, whose values say which are padding
        "GlmAsrForConditionalGeneration",  # audio
        "FunAsrNanoForConditionalGeneration",  # a block that is wider than the one before
        "GraniteSpeechForConditionalGeneration",  # changes what a block returned in place
        "MllamaForConditionalGeneration",  # cross attention
        "Mistral4ForCausalLM",  # no tower
    ],
)
def test_a_whole_model_is_exact(name):
    model = getattr(transformers, name)
    outcome = check(Family(KIND, model, model.config_class))
    assert (outcome.result, outcome.sentence) == (EXACT, "")


def test_a_frozen_tower_is_in_evaluation_mode_though_its_projector_is_trained():
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


def test_nothing_asks_for_a_model_by_its_name():
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
