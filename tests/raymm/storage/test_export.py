"""``raymm export``: folders that Hugging Face loads, with the numbers of the run."""

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, SiglipVisionModel

import raymm
from raymm.actors.optimizer.checkpoint_shards import checksum
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.storage.checkpoint import CheckpointStore
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
