"""Weights of a checkpoint in a model of this process."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, SiglipVisionConfig

import raymm
from raymm.actors.optimizer.averages import AVERAGE_NAME
from raymm.actors.optimizer.checkpoint_shards import store_shard
from raymm.errors import CheckpointError
from raymm.storage.loading import load_into_model
from raymm.storage.manifest import FileEntry, Manifest, write_manifest

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
WEIGHT = "llm/module.model.norm.weight"
AVERAGE = f"optimizer/{WEIGHT}/{AVERAGE_NAME}"


def model() -> raymm.MultimodalModule:
    vision = raymm.ModalityModule(SiglipVisionConfig(image_size=8, patch_size=4, **SIZES), "mlp")
    return raymm.MultimodalModule({"vision": vision}, LlamaConfig(vocab_size=32, **SIZES))


def tensors(described: raymm.MultimodalModule) -> dict[str, torch.Tensor]:
    described.materialize()
    return {
        f"{name}/{key}": tensor.detach().clone()
        for name, modality in described.modalities.items()
        for key, tensor in modality.state_dict().items()
    }


def save(folder: Path, stored: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    file = "model-rank0.safetensors"
    written = store_shard(str(folder), file, stored)
    write_manifest(folder, Manifest(
        step=7, index=dict.fromkeys(stored, file), plan={}, run={}, trainer={},
        files={file: FileEntry(size=written.file.size, xxh3_128=written.file.checksum)},
    ))
    return folder


def test_all_weights_come_from_the_checkpoint(tmp_path) -> None:
    stored = {name: torch.randn_like(t) for name, t in tensors(model()).items()}
    described = model()
    assert load_into_model(described, save(tmp_path / "step", stored)).step == 7
    for name, tensor in tensors(described).items():
        assert torch.equal(tensor, stored[name]), name


def test_averages_replace_the_weights_on_request(tmp_path) -> None:
    stored = tensors(model())
    folder = save(tmp_path / "step", {**stored, AVERAGE: torch.full_like(stored[WEIGHT], 3.0)})
    described = model()
    load_into_model(described, folder)
    assert torch.equal(tensors(described)[WEIGHT], stored[WEIGHT])
    load_into_model(described, folder, averaged=True)
    assert (tensors(described)[WEIGHT] == 3).all()
    with pytest.raises(CheckpointError, match="average"):
        load_into_model(described, save(tmp_path / "plain", stored), averaged=True)


def test_missing_and_unknown_tensors_are_named(tmp_path) -> None:
    stored = tensors(model())
    lacking = {name: t for name, t in stored.items() if name != WEIGHT}
    with pytest.raises(CheckpointError, match=WEIGHT):
        load_into_model(model(), save(tmp_path / "lacking", lacking))
    more = {**stored, "audio/module.weight": torch.ones(2)}
    with pytest.raises(CheckpointError, match="audio/module.weight"):
        load_into_model(model(), save(tmp_path / "more", more))
    wrong = {**stored, WEIGHT: torch.ones(3)}
    with pytest.raises(CheckpointError, match=WEIGHT):
        load_into_model(model(), save(tmp_path / "wrong", wrong))


def test_a_graph_is_not_loaded_in_one_process(tmp_path) -> None:
    graph = raymm.ModuleDag({
        "a": raymm.DagModule(torch.nn.Linear(2, 2), reads={"input": "x"}),
        "loss": raymm.DagLoss(torch.nn.Identity(), inputs={"input": "a"}),
    })
    with pytest.raises(TypeError, match="ModuleDag are not loaded in one process"):
        load_into_model(graph, tmp_path)
