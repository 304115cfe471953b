"""VLMs by configuration: load a folder, train, resume, and export the same folder."""

from __future__ import annotations

import json
import shutil
from itertools import takewhile
from pathlib import Path

import peft
import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open
from transformers import AutoModelForImageTextToText, AutoProcessor

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.errors import ConfigError
from raymm.model.vlm import PretrainedVlm
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.export import export_model
from raymm.storage.loading import load_into_model
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import modalities, tiny
from tests.support.trainer_groups import trainer_groups

pytestmark = pytest.mark.usefixtures("ray_cluster")
LR, STEPS = 1e-3, 4


def configuration(tmp_path, kind="idefics3", **changes):
    folder, data = tiny(kind)
    values = {
        "run": {
            "storage_path": str(tmp_path / "run"), "steps": STEPS, "checkpoint_every": 2,
            "device": "cpu", "seed": 3,
        },
        "model": {"path": folder, "train": {"vision": "frozen"}},
        "data": {
            "train": data, "modalities": modalities(kind), "batch_size": 4, "microbatches": 2,
        },
        "parallel": {"language_model": {"pp": 2}, "encoders": {"vision": {"pp": 2}}},
        "optimizer": {"lr": LR, "max_grad_norm": None, "schedule": "constant", "warmup_steps": 0},
        "resources": {"cpus": 0.1},
    }
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**values, **changes}))
    return file


def keys(folder):
    names: dict[str, tuple] = {}
    for file in Path(folder).glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            names |= {n: tuple(opened.get_slice(n).get_shape()) for n in opened.keys()}
    return names


def losses_in_one_process(config, steps=STEPS, sampler=None):
    """Return losses of a loop over the model's own forward."""
    model = build_model(config)
    assert isinstance(model, PretrainedVlm)
    rule = config.optimizer.build(steps)
    optimizer = torch.optim.AdamW(
        trainer_groups(model.materialize(), rule.weight_decay), lr=LR, betas=rule.betas,
        eps=rule.eps,
    )
    losses = []
    data = with_vocabulary(config.data, model)
    for step in local_steps(data, steps=steps, sampler=sampler):
        optimizer.zero_grad()
        loss = model.loss(step.microbatches)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory, ray_cluster):
    """Return the configuration of a run that was resumed once, with evaluations of texts."""
    folder = tmp_path_factory.mktemp("trained")
    file = configuration(folder)
    evaluate = {
        "every": 4, "samples": 4, "generate": {"max_tokens": 6}, "metrics": ["anls", "perplexity"],
    }
    own = [f"run.evaluate={json.dumps(evaluate)}", f"data.heldout={tiny('idefics3')[1]}"]
    command = ["train", str(file), *(part for value in own for part in ("--set", value))]
    assert main([*command, "--set", "run.steps=2"]) == 0
    assert main(command) == 0
    return file


def test_a_vlm_folder_is_trained_resumed_and_exported(trained, tmp_path):
    config = load_config(trained)
    assert losses(trained.parent) == pytest.approx(losses_in_one_process(config), rel=1e-5)
    model = build_model(config)
    assert isinstance(model, PretrainedVlm)
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None
    load_into_model(model, checkpoint.folder)
    out, folder = tmp_path / "out", str(config.model.path)
    export_model(
        build_model(config), config.run.storage_path, str(out), config.data.processor,
        shard_size="200KB",
    )
    assert keys(out) == keys(folder)
    assert len([*out.glob("*.safetensors")]) > 1
    read, whole = AutoModelForImageTextToText.from_pretrained(out), model.materialize()
    assert type(read) is type(whole)
    example = dict(model.example)
    with torch.no_grad():
        ours, theirs = whole.eval()(**example).logits, read.eval()(**example).logits
    assert torch.equal(ours, theirs)
    before = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    changed = {n for n, t in read.state_dict().items() if not torch.equal(t, before[n])}
    assert changed and not any("vision" in name for name in changed)
    first, second = (AutoProcessor.from_pretrained(each) for each in (folder, out))
    assert first.chat_template == second.chat_template
    assert first.to_dict() == second.to_dict()


def close(actual, expected):
    return float((actual - expected).norm()) <= 1e-5 * float(expected.norm())


def losses(tmp_path):
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def test_vlm_options_by_configuration(tmp_path):
    folder, data = tiny("gemma3")
    lora = {"lora": {"r": 2, "alpha": 4}}
    file = configuration(
        tmp_path, "gemma3",
        data={
            "train": data, "modalities": modalities("gemma3"), "batch_size": 4, "microbatches": 2,
            "batching": {"method": "balanced", "cache": str(tmp_path / "scans")},
        },
        model={
            "path": folder, "packing": True,
            "train": {"vision": "frozen", "projector": "frozen", "language_model": lora},
        },
        parallel={"language_model": {"cp": 2}, "encoders": {"vision": {}}},
    )
    assert main(["train", str(file)]) == 0
    config = load_config(file)
    assert losses(tmp_path) == pytest.approx(losses_in_one_process(config), rel=1e-5)
    out = tmp_path / "out"
    assert main(["export", str(file), "--out", str(out)]) == 0
    model = build_model(config)
    assert isinstance(model, PretrainedVlm)
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None
    load_into_model(model, checkpoint.folder)
    base, example = AutoModelForImageTextToText.from_pretrained(folder).eval(), dict(model.example)
    with torch.no_grad():
        due, before = model.materialize().eval()(**example).logits, base(**example).logits
        read = peft.PeftModel.from_pretrained(base, out).eval()(**example).logits
    assert close(read, due) and not close(before, due)
    assert AutoProcessor.from_pretrained(out).chat_template
    assert main(["export", str(file), "--out", str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        assert close(merged(**example).logits, due)


def test_a_vlm_run_resumes_under_another_layout(tmp_path):
    shared = {"dp": 2, "sharding": "fsdp"}
    file = configuration(
        tmp_path, parallel={"language_model": shared, "encoders": {"vision": shared}}
    )
    assert main(["train", str(file), "--set", "run.steps=2"]) == 0
    configuration(
        tmp_path, parallel={"language_model": {"tp": 2}, "encoders": {"vision": {"pp": 2}}}
    )
    assert main(["train", str(file)]) == 0
    config = load_config(file)
    assert losses(tmp_path) == pytest.approx(losses_in_one_process(config), rel=1e-5)


def test_texts_are_generated_in_training_and_by_the_command(trained, capsys):
    folder, data = tiny("idefics3")
    run = trained.parent / "run"
    config = load_config(trained)
    rows = [r for r in read_metrics(run / "metrics.jsonl") if "texts" in r]
    assert [(row["step"], row["texts"]) for row in rows] == [(0, 4), (2, 4), (4, 4)]
    assert rows[-1]["heldout_perplexity"] < rows[0]["heldout_perplexity"]
    model = build_model(config)
    assert isinstance(model, PretrainedVlm)
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None
    load_into_model(model, checkpoint.folder)
    samples = {row["id"]: row for row in map(json.loads, Path(data).read_text().splitlines())}
    processor = AutoProcessor.from_pretrained(folder)
    lines = (run / "evaluations/step-00000004.jsonl").read_text().splitlines()
    for row in map(json.loads, lines):
        messages, pictures = samples[row["id"]]["messages"][:-1], samples[row["id"]]["images"]
        due = written(model.materialize().eval(), processor, messages, Path(data).parent, pictures)
        assert row["text"] == due
    assert len({row["text"] for row in map(json.loads, lines)}) > 1
    capsys.readouterr()
    picture = Path(data).parent / "images/0-0.png"
    assert main([
        "generate", str(trained), "--prompt", "What is in the picture?",
        "--item", f"image={picture}", "--max-tokens", "6",
    ]) == 0  # fmt: skip
    asked = samples["sample-0"]["messages"][:-1]
    due = written(
        model.materialize(), processor, asked, Path(data).parent, samples["sample-0"]["images"]
    )
    assert f"> What is in the picture?\n{due}\n" in capsys.readouterr().out


def test_texts_end_at_the_configured_end_token(tmp_path, capsys):
    """Check that other special tokens, which may be part of an answer, do not end a text."""
    folder, data = tiny("idefics3")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is it?"}]
    model.generation_config.eos_token_id = None
    ids = written_ids(model, processor, asked, Path(data).parent, [])
    own = tmp_path / "folder"
    shutil.copytree(folder, own)
    first, last = ids[0], next(token for token in ids if token != ids[0])
    token = processor.tokenizer.convert_ids_to_tokens(first)
    processor.tokenizer.add_special_tokens({"additional_special_tokens": [token]})
    processor.save_pretrained(own)
    settings = {"eos_token_id": [last, 0], "do_sample": True, "repetition_penalty": 1.5}
    (own / "generation_config.json").write_text(json.dumps(settings))
    file = configuration(tmp_path, model={"path": str(own), "train": {"vision": "frozen"}})
    values = ["run.steps=1", "run.checkpoint_every=1", "optimizer.lr=1e-12"]
    assert main(["train", str(file), *(part for one in values for part in ("--set", one))]) == 0
    capsys.readouterr()
    due = ids[: ids.index(last)]
    for option, skip in ((), True), (("--no-skip-special-tokens",), False):
        command = ["generate", str(file), "--prompt", "What is it?", "--max-tokens", "6", *option]
        assert main(command) == 0
        printed = capsys.readouterr().out
        assert "ignored settings of the model's generation_config.json: do_sample True" in printed
        assert "repetition_penalty 1.5" in printed
        text = processor.decode(due, skip_special_tokens=skip).strip()
        assert f"> What is it?\n{text}\n" in printed and (text != "") != skip


def written_ids(model, processor, messages, folder, pictures):
    """Return the ids that transformers generates."""
    prompt = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    images = [Image.open(folder / name) for name in pictures]
    inputs = processor(text=prompt, images=images or None, return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)
    return ids[0, inputs["input_ids"].shape[1] :].tolist()


def written(model, processor, messages, folder, pictures):
    """Return the text that transformers generates, up to the end of a turn."""
    ids = written_ids(model, processor, messages, folder, pictures)
    ends = {processor.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    return processor.decode(list(takewhile(lambda one: one not in ends, ids)), True).strip()


def test_a_plan_is_made_of_a_folder_and_its_data(tmp_path, capsys):
    file = configuration(tmp_path, parallel={}, planning={"ranks": 3, "device": "cpu"})
    assert main(["plan", str(file), "--out", str(tmp_path / "plan")]) == 0
    assert (tmp_path / "plan" / "plan.json").is_file()
    assert "vision" in capsys.readouterr().out


@pytest.mark.parametrize(
    "model, why",
    [
        ({"train": {"vision": "frozen"}}, "give exactly one of path"),
        ({"path": "x", "merge": "prefix"}, "merge is given, but a Hugging Face VLM"),
        ({"path": "x", "train": {"vision": "half"}}, "model.train.vision"),
    ],
)
def test_unsupported_sections_are_rejected(tmp_path, model, why):
    with pytest.raises(ConfigError, match=why):
        load_config(configuration(tmp_path, model=model))


def test_missing_parts_of_a_model_are_rejected_by_name(tmp_path):
    file = configuration(tmp_path)
    with pytest.raises(ConfigError, match=r"model: train has 'ears'.*vision"):
        build_model(load_config(file, ["model.train.ears=full"]))
    with pytest.raises(ConfigError, match="no_such"):
        own = f"data.processor={tiny('gemma3')[0]}"
        build_model(load_config(file, ["model.path=no_such", own]))


def test_a_folder_and_a_file_are_enough(tmp_path, capsys):
    folder, data = tiny("idefics3")
    out = tmp_path / "run"
    arguments = ["train", "--model", folder, "--data", data, "--out", str(out)]
    arguments += ["--set", "planning.ranks=1"]
    assert main([*arguments, "--set", "run.steps=2"]) == 0
    written = yaml.safe_load((out / "run.yaml").read_text())
    assert written["model"]["path"] == folder
    assert written["model"]["train"]["vision"] == "frozen"
    assert written["data"]["modalities"] == {"image": {"column": "images"}}
    assert load_config(out / "run.yaml").data.processor == folder
    assert len([r for r in read_metrics(out / "metrics.jsonl") if "loss" in r]) == 2
    assert "lr: 1.0e-05" in capsys.readouterr().out
    assert main([*arguments, "--set", "run.steps=3"]) == 0  # resumes
    assert len([r for r in read_metrics(out / "metrics.jsonl") if "loss" in r]) == 3
    assert main(["train", "--model", folder]) == 2
    assert "--data DATA" in capsys.readouterr().err
