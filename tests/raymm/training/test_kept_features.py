"""Cached features have keys of all their inputs: any change uses another folder."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig, SiglipVisionModel

import raymm
from raymm.actors.weights.source import FactorySource
from raymm.config.sections import CacheSection
from raymm.data import DataConfig, ModalityDataConfig
from raymm.training.kept_features import CodeKey, KeptFeatures, _digest

CODE = """
import torch
from torch import nn

class Block(nn.Module):
    @staticmethod
    def scale(x):
        return x * {scale}

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 16)

    def forward(self, x):
        return self.linear(self.scale(x)){after}

def make():
    block = Block()
    nn.init.normal_(block.linear.weight, std={std})
    return block
"""
AS_IT_WAS = {"scale": 1.0, "after": "", "std": 0.02}
SIZES = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}
PICTURES = SiglipVisionConfig(image_size=8, patch_size=4, **SIZES)
PROCESSED = ModalityDataConfig(column="images", processor="PIL.Image:open")


def key(encoder, blocks: int = 1) -> str:
    data = SimpleNamespace(modalities={"vision": PROCESSED})
    return _digest("vision", encoder, blocks, data, "x", CodeKey())


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Return a function that writes a user's module, as imported by another run."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(**values):
        (tmp_path / "own_encoder.py").write_text(CODE.format(**AS_IT_WAS | values))
        sys.modules.pop("own_encoder", None)
        importlib.invalidate_caches()
        return importlib.import_module("own_encoder")

    yield write
    sys.modules.pop("own_encoder", None)


def factory(written, **values) -> str:
    written(**values)
    return key(raymm.ModalityModule(FactorySource("own_encoder:make"), "linear", frozen=True))


def live(written, **values) -> str:
    module = written(**values).Block().requires_grad_(False)
    for parameter in module.parameters():
        torch.nn.init.ones_(parameter)
    return key(raymm.ModalityModule(module, "linear"))


@pytest.mark.parametrize("of", [factory, live])
def test_code_of_a_custom_encoder_counts(written, of) -> None:
    before = of(written)
    assert of(written, after="  # a comment") == before
    assert len({before, of(written, scale=2.0), of(written, after=" + 1")}) == 3


def test_initialization_of_weights_counts(written) -> None:
    assert factory(written) != factory(written, std=0.5)


def test_a_seed_counts_for_weights_that_a_folder_lacks(tmp_path) -> None:
    SiglipVisionModel(PICTURES).save_pretrained(tmp_path)

    def of(seed, missing):
        return key(raymm.ModalityModule(
            str(tmp_path), "mlp", frozen=True, seed=seed, missing_weights=missing
        ))

    assert of(1, "fresh") != of(2, "fresh")
    assert of(1, None) == of(2, None)


def test_the_computation_of_features_counts(tmp_path) -> None:
    """Change the rounding, as sums over processes that shard an encoder's heads do."""
    encoder = raymm.ModalityModule(PICTURES, "mlp", frozen=True)
    model = raymm.MultimodalModule({"vision": encoder}, LlamaConfig(vocab_size=32, **SIZES))
    data = DataConfig(
        train="train.jsonl", tokenizer="tokenizer", modalities={"vision": PROCESSED},
        batch_size=2, microbatches=2,
    )
    cache = CacheSection(features="disk", folder=str(tmp_path))

    def folder(tp, computed):
        spec = raymm.MultimodalParallelSpec(
            {"vision": raymm.ParallelSpec(tp=tp)}, num_microbatches=2
        )
        kept = KeptFeatures.of(cache, model, spec.plan(model), data, computed)
        return kept.folders["vision"].path

    assert folder(1, "cpu fp32") == folder(1, "cpu fp32")
    assert len({folder(1, "cpu fp32"), folder(2, "cpu fp32"), folder(1, "cpu bf16")}) == 3
