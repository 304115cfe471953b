"""``raymm export``: folders that Hugging Face loads, with the numbers of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionModel,
)

import raymm
from raymm.actors.adapters.lora import adapt, plain_copy
from raymm.actors.adapters.lora_config import LoraConfig
from raymm.actors.optimizer.checkpoint_shards import checksum
from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.errors import CheckpointError, ModelError
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.export import ModelFolder
from raymm.storage.manifest import FileEntry, read_manifest, write_manifest
from tests.support.tiny_run import checkpoint_tensors, heldout_rows

LLM, VISION = "llm/module.", "vision/module."


def exported(finished, raymm, tmp_path):
    out = tmp_path / "export"
    code, text = raymm("export", finished.config, "--out", str(out))
    assert code == 0
    folders = {"language_model", "vision_encoder", "vision_projector"}
    assert {folder.name for folder in out.iterdir()} == folders
    assert all(f"wrote {out / name}" in text for name in folders)
    return out


def test_exported_modules_load_and_reproduce_the_held_out_loss(finished, raymm, tmp_path):
    """Compute the final held-out loss in plain Hugging Face code."""
    out = exported(finished, raymm, tmp_path)
    llm = AutoModelForCausalLM.from_pretrained(out / "language_model").eval()
    vision = SiglipVisionModel.from_pretrained(out / "vision_encoder").eval()
    projector = load_projector(out / "vision_projector")
    assert AutoTokenizer.from_pretrained(out / "language_model").chat_template
    assert llm.lm_head.weight is llm.model.embed_tokens.weight

    total, count = 0.0, 0
    for step in local_steps(load_config(finished.config).data, "heldout"):
        for microbatch in step.microbatches:
            for row in range(microbatch["input_ids"].shape[0]):
                loss, tokens = row_loss(llm, vision, projector, microbatch, row)
                total, count = total + loss, count + tokens
    expected = heldout_rows(finished.path)[-1]["heldout_loss"]
    assert abs(total / count - expected) < 1e-5


def load_projector(folder):
    return raymm.Projector.from_pretrained(folder).eval()


@torch.no_grad()
def row_loss(llm, vision, projector, microbatch, row):
    """Return summed cross entropy and label tokens of one row: image tokens, then its text."""
    length = int(microbatch["attention_mask"][row].sum())
    embeddings = llm.get_input_embeddings()(microbatch["input_ids"][row, :length])
    labels = microbatch["labels"][row, :length].clone()
    labels[0] = -100
    images = microbatch.get("vision")
    if images is not None:
        pixels = images["pixel_values"][images["sample_index"] == row]
        if len(pixels):
            features = projector(vision(pixels).last_hidden_state).flatten(0, 1)
            embeddings = torch.cat([features, embeddings])
            labels = torch.cat([torch.full((len(features),), -100), labels])
    logits = llm(inputs_embeds=embeddings[None]).logits[0]
    loss = torch.nn.functional.cross_entropy(
        logits[:-1], labels[1:], ignore_index=-100, reduction="sum"
    )
    return float(loss), int((labels[1:] != -100).sum())


def test_exported_weights_are_the_checkpoints(finished, raymm, tmp_path):
    out = exported(finished, raymm, tmp_path)
    stored = checkpoint_tensors(finished.path)
    modules = {
        "llm/module.": AutoModelForCausalLM.from_pretrained(out / "language_model"),
        "vision/module.": SiglipVisionModel.from_pretrained(out / "vision_encoder"),
        "vision/projector.": load_projector(out / "vision_projector"),
    }
    seen = 0
    for prefix, module in modules.items():
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter, stored[prefix + name]), prefix + name
            seen += 1
    assert seen == len([
        name for name in stored
        if not name.startswith("optimizer/") and name != "llm/module.lm_head.weight"
        and not name.endswith("position_ids")
    ])


def test_export_overwrites_nothing_and_needs_a_checkpoint(finished, raymm, tmp_path):
    code, text = raymm("export", finished.config, "--out", str(tmp_path))
    assert code == 2 and "output (--out) is" in text and str(tmp_path) in text and "exists" in text
    code, text = raymm(
        "export", finished.config, "--out", str(tmp_path / "x"),
        "--set", f"run.storage_path={tmp_path / 'no-run'}",
    )
    assert code == 2 and "no-run" in text and "no checkpoint" in text


def test_a_checkpoint_of_another_model_is_refused(finished, raymm, tmp_path):
    code, text = raymm(
        "export", finished.config, "--out", str(tmp_path / "x"),
        "--set", "model.language_model.config.intermediate_size=40",
    )
    assert code == 2 and "CheckpointError" in text
    assert "mlp" in text and "(48, 32)" in text and "(40, 32)" in text
    code, text = raymm(
        "export", finished.config, "--out", str(tmp_path / "x"),
        "--set", "model.language_model.config.num_hidden_layers=3",
    )
    assert code == 2 and "lacks" in text and "layers.2." in text
    assert not (tmp_path / "x").exists()


def test_non_finite_weights_are_not_exported(finished, raymm, tmp_path):
    """Check a checkpoint that is intact otherwise; raymm itself never writes one."""
    run = finished.copy_until(tmp_path / "run", 12)
    folder = CheckpointStore(run).latest()
    manifest = read_manifest(folder)
    name = "vision/projector.layers.0.bias"
    shard = manifest.index[name]
    tensors = load_file(folder / shard)
    tensors[name][3] = torch.inf
    save_file(tensors, folder / shard)
    found = checksum(folder / shard)
    manifest.files[shard] = FileEntry(size=found.size, xxh3_128=found.checksum)
    write_manifest(folder, manifest)
    code, text = raymm(
        "export", finished.config, "--out", str(tmp_path / "x"),
        "--set", f"run.storage_path={run}",
    )
    assert code == 2 and "vision_encoder.projector.layers.0.bias (1 of " in text
    assert str(folder) in text and not (tmp_path / "x").exists()


INPUTS = {"input_ids": torch.arange(8)[None]}
TIED = {"tie_word_embeddings": True}


def folder(path, dtype=torch.bfloat16, **values):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, **values,
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(path)
    return path


def read(path):
    return PretrainedSource(str(path), language_model=True).build()


def contents(path):
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


def set_config(path, **values):
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def logits(model):
    with torch.no_grad():
        return model.eval()(**INPUTS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_an_untrained_model_is_written_byte_for_byte(tmp_path, dtype, tied):
    source = folder(tmp_path / "in", dtype, tie_word_embeddings=tied)
    ModelFolder(str(source), "source").save(read(source), tmp_path / "out", INPUTS, "3KB")
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(
        tmp_path / "due", max_shard_size="3KB"
    )
    assert contents(tmp_path / "out") == contents(tmp_path / "due")


@pytest.mark.parametrize("values", [
    {"num_labels": 12},  # transformers sorts the keys of id2label as numbers
    {"section": {"dtype": None}}, {"section": {"dtype": "float16"}}, {"section": {}},
    {"section": {"sections": [{"dtype": None}]}},
])  # fmt: skip
def test_configuration_sections_are_exported_unchanged(tmp_path, values):
    source = folder(tmp_path / "in", **values)
    ModelFolder(str(source), "source").save(read(source), tmp_path / "out", INPUTS)
    assert contents(tmp_path / "out") == contents(source)


def test_a_second_export_of_trained_weights_is_equal(tmp_path):
    source = folder(tmp_path / "in", **TIED)
    model = read(source)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    ModelFolder(str(source), "source").save(model, tmp_path / "one", INPUTS, "3KB")
    one, two = tmp_path / "one", tmp_path / "two"
    ModelFolder(str(one), "source").save(read(one), two, INPUTS, "3KB")
    assert contents(one) == contents(two)
    again = AutoModelForCausalLM.from_pretrained(one, dtype="auto")
    assert again.dtype == torch.bfloat16
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name).bfloat16()), name


def test_each_tensor_keeps_its_own_dtype(tmp_path):
    source = folder(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    tensors = {n: t.float() if "norm" in n else t for n, t in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    ModelFolder(str(source), "source").save(read(source), tmp_path / "out", INPUTS)
    assert contents(tmp_path / "out") == contents(source)


def test_another_dtype_is_written_on_request(tmp_path):
    source = folder(tmp_path / "in")
    ModelFolder(str(source), "float16").save(read(source), tmp_path / "out", INPUTS)
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float16}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    with pytest.raises(ModelError, match="dtype is 'fp8'; accepted: source, float32"):
        ModelFolder(str(source), "fp8")


def test_values_that_the_dtype_cannot_hold_are_refused(tmp_path):
    model = read(folder(tmp_path / "in"))
    with torch.no_grad():
        model.lm_head.weight[0, 0] = 1e6
    with pytest.raises(CheckpointError, match=r"lm_head.weight has values too large"):
        ModelFolder(None, "float16").save(model, tmp_path / "out", INPUTS)


@pytest.mark.parametrize("targets", [("lm_head",), ("lm_head", "q_proj")])
def test_a_merged_head_is_not_tied_to_the_embedding(tmp_path, targets):
    source = folder(tmp_path / "in", torch.float32, **TIED)
    model = adapt(read(source), ["lm_head"], LoraConfig(r=2, targets=targets), seed=1)
    with torch.no_grad():
        model.lm_head.lora_B.normal_()
    merged = plain_copy(model, merged=True)
    ModelFolder(str(source), "source").save(merged, tmp_path / "out", INPUTS)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(again), logits(model), atol=1e-6)
    assert model.config.tie_word_embeddings


def test_a_folder_that_reads_back_differently_is_refused(tmp_path):
    model = read(folder(tmp_path / "in"))
    model.model.layers[0].self_attn.scaling = 3.0  # state that is in no file of the folder
    with pytest.raises(CheckpointError, match="its outputs differ by"):
        ModelFolder(None, "source").save(model, tmp_path / "out", INPUTS)


def test_weights_that_hooks_compute_are_written_and_compared(tmp_path):
    model = read(folder(tmp_path / "in"))
    torch.nn.utils.weight_norm(model.model.layers[0].mlp.up_proj)
    due = logits(model)
    ModelFolder(None, "source").save(model, tmp_path / "out", None)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.allclose(logits(again), due, atol=1e-5)


def fp8_folder(path):
    source = folder(path, torch.float32)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors[name] = tensor
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 400
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    set_config(source, quantization_config={
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"],
    })
    return source


def test_an_fp8_folder_is_written_without_quantisation(tmp_path):
    plain = logits(read(folder(tmp_path / "plain", torch.float32)))
    source = fp8_folder(tmp_path / "in")
    with pytest.raises(ModelError, match=r"quantised \(fp8\).*Set --dtype bfloat16"):
        ModelFolder(str(source), "source")
    model = read(source)
    assert float((logits(model) - plain).abs().max()) < 0.1 * float(plain.abs().max())
    ModelFolder(str(source), "float32").save(model, tmp_path / "out", INPUTS)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("method", ["bitsandbytes", "compressed-tensors", "gptq", "awq", "torchao"])
def test_other_quantised_folders_are_refused_by_method(tmp_path, method):
    source = folder(tmp_path / "in")
    set_config(source, quantization_config={"quant_method": method})
    with pytest.raises(ModelError, match=f"quantised with '{method}'; accepted: folders in"):
        PretrainedSource(str(source))
