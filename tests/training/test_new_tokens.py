"""New tokens of whole models: rows that are the mean, trained in full or alone, and exported."""

from __future__ import annotations

import json
from pathlib import Path

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import ConfigError, load_config
from raymm.data import SampleError, local_steps
from raymm.model.whole_model import WholeModel
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_whole
from raymm.training.run_start import with_vocabulary
from tests.tiny_folders import modalities, tiny

pytestmark = pytest.mark.usefixtures("ray_cluster")
LR, STEPS = 1e-2, 3
NEW = ["<point>", "<box>", "<never>"]
LORA = {"language_model": {"lora": {"r": 2, "alpha": 4}}, "projector": "frozen"}
TIED, UNTIED = "gemma3", "qwen2_5_vl"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Samples of text that have two of the new tokens."""
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text("".join(
        json.dumps({"messages": [
            {"role": "user", "content": f"Where is {number}? <box>"},
            {"role": "assistant", "content": f"<point> {number % 3} <box> {number}."},
        ]}) + "\n"
        for number in range(16)
    ))  # fmt: skip
    return str(file)


def configuration(folder, kind, rows, train=None, parallel=None, **run):
    values = {
        "run": {
            "storage_path": str(folder / "run"), "steps": STEPS, "checkpoint_every": 1,
            "device": "cpu", "seed": 3, **run,
        },
        "model": {"path": tiny(kind)[0], "train": train or {}, "new_tokens": NEW},
        "data": {"train": rows, "batch_size": 4, "microbatches": 2},
        "parallel": parallel or {"language_model": {"pp": 2}},
        "optimizer": {"lr": LR, "max_grad_norm": None, "schedule": "constant", "warmup_steps": 0},
        "resources": {"cpus": 0.1},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(values))
    return file


def losses(folder):
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return [row["loss"] for row in rows if "loss" in row]


def ids_of(folder):
    return AutoProcessor.from_pretrained(folder).tokenizer.convert_tokens_to_ids(NEW)


def resized(kind):
    """The model of a kind, resized by transformers, with the mean of its rows in new ones."""
    model = AutoModelForImageTextToText.from_pretrained(tiny(kind)[0])
    old = len(model.get_input_embeddings().weight)
    means = {
        name: part.weight.detach().mean(0)
        for name in ("get_input_embeddings", "get_output_embeddings")
        if (part := getattr(model, name)()) is not None
    }
    model.resize_token_embeddings(old + len(NEW), mean_resizing=False)
    with torch.no_grad():
        for name, mean in means.items():
            getattr(model, name)().weight[old:] = mean
    return model, old


def batches(config):
    data = with_vocabulary(config.data, build_model(config))
    return [step.microbatches for step in local_steps(data, steps=STEPS)]


def loss_of(model, microbatches):
    """A step's loss by the forward of transformers."""
    total, count = torch.zeros(()), 0
    for batch in microbatches:
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs, use_cache=False).logits
        labels = batch["labels"][:, 1:]
        total = total + torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels.flatten(), reduction="sum"
        )
        count += int((labels != -100).sum())
    return total / count


def optimizer_of(config, parameters):
    rule = config.optimizer.build(STEPS)
    assert rule.weight_decay
    return torch.optim.AdamW(
        parameters, lr=LR, betas=rule.betas, eps=rule.eps, weight_decay=rule.weight_decay
    )


def trained(config):
    model = build_model(config)
    assert isinstance(model, WholeModel)
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None
    load_into_whole(model, checkpoint.folder)
    return model.materialize().eval()


@pytest.mark.parametrize("kind", [TIED, UNTIED])
def test_full_steps_equal_a_model_resized_by_transformers(tmp_path, rows, kind):
    file = configuration(tmp_path, kind, rows)
    assert main(["train", str(file), "--set", "run.steps=1"]) == 0
    made = (tmp_path / "run" / "model" / "config.json").stat().st_mtime_ns
    assert main(["train", str(file)]) == 0
    assert (tmp_path / "run" / "model" / "config.json").stat().st_mtime_ns == made
    config = load_config(file)
    steps = batches(config)
    model, old = resized(kind)
    assert ids_of(tmp_path / "run" / "model") == [old, old + 1, old + 2]
    before = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(before[name][:old], tensor[:old])
        torch.testing.assert_close(before[name], tensor, rtol=0, atol=1e-7)
    of_towers = ("vision_tower", "visual", "multi_modal_projector")
    own = [p for n, p in model.named_parameters() if not any(part in n for part in of_towers)]
    optimizer, due = optimizer_of(config, own), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model.train(), step)
        loss.backward()
        optimizer.step()
        due.append(loss.item())
    assert losses(tmp_path) == pytest.approx(due, rel=1e-6)

    out = tmp_path / "out"
    assert main(["export", str(file), "--out", str(out)]) == 0
    read, whole = AutoModelForImageTextToText.from_pretrained(out).eval(), trained(config)
    tied = kind == TIED
    assert AutoConfig.from_pretrained(out).get_text_config().vocab_size == old + 3
    stored = [n for f in out.glob("*.safetensors") for n in load_file(f)]
    assert any("lm_head" in name for name in stored) != tied
    assert (read.get_input_embeddings().weight is read.get_output_embeddings().weight) == tied
    assert ids_of(out) == [old, old + 1, old + 2]
    with torch.no_grad():
        for batch in steps[0]:
            inputs = {name: value for name, value in batch.items() if name != "labels"}
            assert torch.equal(read(**inputs).logits, whole(**inputs).logits)


def with_hooks(model, old):
    """What trains next to adapters: rows of the embedding and the head from ``old`` on."""
    weights = {id(p): p for p in (
        model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )}  # fmt: skip
    for weight in weights.values():
        weight.requires_grad_(True)
        weight.register_hook(lambda g: torch.cat((torch.zeros_like(g[:old]), g[old:])))
    return list(weights.values())


@pytest.mark.parametrize("kind, layout", [
    (TIED, {"pp": 2}), (UNTIED, {"pp": 2}), (TIED, {"tp": 2}),
    (UNTIED, {"dp": 2, "sharding": "fsdp"}),
])  # fmt: skip
def test_only_new_rows_train_next_to_adapters(tmp_path, rows, kind, layout):
    file = configuration(tmp_path, kind, rows, LORA, {"language_model": layout})
    assert main(["train", str(file), "--set", "run.steps=2"]) == 0
    assert main(["train", str(file)]) == 0
    config = load_config(file)
    steps = batches(config)
    model, old = resized(kind)
    # The same adapters, as raymm draws them, on a model with plain weights.
    fresh = build_model(load_config(file))
    assert isinstance(fresh, WholeModel)
    reference = fresh.materialize()
    adapters = {n: p for n, p in reference.named_parameters() if "lora_" in n}
    targets = sorted({name.rpartition(".")[0] for name in adapters})
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets))
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            own = name.removeprefix("base_model.model.").removesuffix(".default.weight")
            if own in adapters:
                parameter.copy_(adapters.pop(own))
    assert not adapters
    plain = wrapped.base_model.model
    before = plain.get_input_embeddings().weight.detach().clone()
    weights = with_hooks(plain, old)
    low_rank = [p for n, p in wrapped.named_parameters() if "lora_" in n]
    optimizer, due = optimizer_of(config, [*low_rank, *weights]), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(wrapped, step)
        loss.backward()
        optimizer.step()
        for weight in weights:  # weight decay moves them in torch
            with torch.no_grad():
                weight[:old] = weight[:old] / (1 - LR * config.optimizer.build(1).weight_decay)
        due.append(loss.item())
    assert losses(tmp_path) == pytest.approx(due, rel=1e-5)

    for options in ([], ["--merge"]):
        out = tmp_path / f"out{len(options)}"
        assert main(["export", str(file), "--out", str(out), *options]) == 0
        base = out if options else out / "model"
        read = AutoModelForImageTextToText.from_pretrained(base)
        assert ids_of(base) == [old, old + 1, old + 2]
        tied = read.get_input_embeddings().weight is read.get_output_embeddings().weight
        assert tied == (kind == TIED)
        for part in (read.get_input_embeddings(), read.get_output_embeddings()):
            first = AutoModelForImageTextToText.from_pretrained(tiny(kind)[0])
            head = part is read.get_output_embeddings()
            was = first.get_output_embeddings() if head else first.get_input_embeddings()
            assert torch.equal(part.weight[:old], was.weight)
            mean = was.weight.detach().mean(0)
            assert (part.weight[old : old + 2] - mean).norm(dim=-1).min() > 1e-3
        whole = trained(config)
        if not options:
            read = peft.PeftModel.from_pretrained(read, out / "adapters")
        with torch.no_grad():
            for batch in steps[0]:
                inputs = {name: value for name, value in batch.items() if name != "labels"}
                ours, theirs = whole(**inputs).logits, read.eval()(**inputs).logits
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(before) == old + 3
