"""New tokens of VLMs: rows initialized with the mean, trained in full or alone, and exported."""

from __future__ import annotations

import json

import peft
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

from raymm.cli.main import main
from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import local_steps
from raymm.errors import ConfigError, ModelError, SampleError
from raymm.model.vlm import PretrainedVlm
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.loading import load_into_model
from raymm.training.run_start import with_vocabulary
from tests.support.tiny_folders import tiny
from tests.support.trainer_groups import trainer_groups

pytestmark = pytest.mark.usefixtures("ray_cluster")
LR, STEPS = 1e-2, 3
NEW = ["<point>", "<box>", "<never>"]
LORA = {"language_model": {"lora": {"r": 2, "alpha": 4}}, "projector": "frozen"}
TIED, UNTIED = "gemma3", "qwen2_5_vl"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Return text samples with two of the new tokens."""
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
    """Return a model resized by transformers, with the mean of its rows in the new ones."""
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
    """Return a step's loss by the forward of transformers."""
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
    assert isinstance(model, PretrainedVlm)
    checkpoint = CheckpointStore(config.run.storage_path).newest()
    assert checkpoint is not None
    load_into_model(model, checkpoint.folder)
    return model.materialize().eval()


@pytest.mark.cells(1)
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
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in of_towers))
    groups = trainer_groups(model, config.optimizer.weight_decay)
    optimizer, due = optimizer_of(config, groups), []
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
    """Train, next to adapters, the rows of the embedding and the head from ``old`` on."""
    weights = {id(p): p for p in (
        model.get_input_embeddings().weight, model.get_output_embeddings().weight
    )}  # fmt: skip
    for weight in weights.values():
        weight.requires_grad_(True)
        weight.register_hook(lambda g: torch.cat((torch.zeros_like(g[:old]), g[old:])))
    return list(weights.values())


@pytest.mark.cells(1)
@pytest.mark.parametrize("kind, layout", [
    (UNTIED, {"pp": 2}), (TIED, {"tp": 2}), (UNTIED, {"dp": 2, "sharding": "fsdp"}),
    (TIED, {"pp": 2}),
])  # fmt: skip
def test_only_new_rows_train_next_to_adapters(tmp_path, rows, kind, layout):
    file = configuration(tmp_path, kind, rows, LORA, {"language_model": layout})
    assert main(["train", str(file), "--set", "run.steps=2"]) == 0
    assert main(["train", str(file)]) == 0
    config = load_config(file)
    steps = batches(config)
    model, old = resized(kind)
    # The same adapters as raymm's, on a model with plain weights.
    fresh = build_model(load_config(file))
    assert isinstance(fresh, PretrainedVlm)
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
    weights = with_hooks(plain, old)
    before = [weight.detach()[:old].clone() for weight in weights]
    low_rank = [p for n, p in wrapped.named_parameters() if "lora_" in n]
    optimizer, due = optimizer_of(config, [*low_rank, *weights]), []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(wrapped, step)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for weight, values in zip(weights, before, strict=True):
                weight[:old] = values  # weight decay has changed them
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


def test_a_processor_with_more_tokens_gets_rows_on_request(tmp_path, rows, capsys):
    processor = AutoProcessor.from_pretrained(tiny(TIED)[0])
    processor.tokenizer.add_tokens(NEW)
    processor.save_pretrained(tmp_path / "processor")
    file = configuration(tmp_path, TIED, rows)
    own = [f"data.processor={tmp_path / 'processor'}", "run.steps=1"]
    with pytest.raises((ConfigError, SampleError), match="model.new_tokens: from_processor"):
        config = load_config(file, [*own, "model.new_tokens=null"])
        list(local_steps(with_vocabulary(config.data, build_model(config)), steps=1))
    with pytest.raises(ConfigError, match="no rows for: '<box>', '<never>'; list them"):
        build_model(load_config(file, [*own, 'model.new_tokens=["<point>"]']))
    options = [part for value in (*own, "model.new_tokens=from_processor")
               for part in ("--set", value)]  # fmt: skip
    assert main(["train", str(file), *options]) == 0
    old = len(resized(TIED)[0].get_input_embeddings().weight) - len(NEW)
    assert ids_of(tmp_path / "run" / "model") == [old, old + 1, old + 2]
    capsys.readouterr()
    prompt = ["--prompt", "<box>", "--max-tokens", "2"]
    assert main(["generate", str(file), *options, *prompt]) == 0
    assert "> <box>" in capsys.readouterr().out


def test_spare_embedding_rows_are_used(tmp_path, rows):
    model = AutoModelForImageTextToText.from_pretrained(tiny(UNTIED)[0])
    old = len(model.get_input_embeddings().weight)
    model.resize_token_embeddings(old + 8, mean_resizing=False)
    model.save_pretrained(tmp_path / "padded", max_shard_size="100KB")
    AutoProcessor.from_pretrained(tiny(UNTIED)[0]).save_pretrained(tmp_path / "padded")
    file = configuration(tmp_path, UNTIED, rows, LORA, {"language_model": {"cp": 2}})
    own = [f"model.path={tmp_path / 'padded'}", "data.processor=" + str(tmp_path / "padded")]
    build_model(load_config(file, own))
    grown = AutoModelForImageTextToText.from_pretrained(tmp_path / "run" / "model")
    for part in ("get_input_embeddings", "get_output_embeddings"):
        before, after = getattr(model, part)().weight, getattr(grown, part)().weight
        assert torch.equal(after[:old], before[:old])
        assert torch.equal(after[old + 3 :], before[old + 3 :])
        mean = before[:old].mean(0).expand(3, -1)
        torch.testing.assert_close(after[old : old + 3], mean, rtol=0, atol=1e-7)
    first, second = (tmp_path / name for name in ("padded", "run/model"))
    shared = [f for f in first.glob("*.safetensors") if f.samefile(second / f.name)]
    assert shared and len(shared) < len([*first.glob("*.safetensors")])
    options = [part for value in own for part in ("--set", value)]
    assert main(["train", str(file), *options, "--set", "run.precision=bf16"]) == 0
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


def test_plans_include_the_new_rows(tmp_path, rows):
    file = configuration(tmp_path, TIED, rows, LORA)
    values = yaml.safe_load(file.read_text())
    values |= {"parallel": {}, "planning": {"ranks": 2, "device": "cpu"}}
    values["model"]["train"]["language_model"]["lora"]["base"] = "int8"
    file.write_text(yaml.safe_dump(values))
    assert main(["plan", str(file), "--out", str(tmp_path / "plan")]) == 0
    assert (tmp_path / "run" / "model" / "new_tokens.json").is_file()
    assert main(["train", str(file), "--set", "run.steps=1"]) == 0
    assert main(["export", str(file), "--out", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize("changes, why", [
    ({"model.new_tokens": []}, r"new_tokens is \(\); accepted: different texts"),
    ({"model.new_tokens": ["<a>", "<a>"]}, "accepted: different texts"),
    ({"model.train": {"language_model": "frozen"}}, "language_model is 'frozen'"),
    ({"model.new_tokens": ["<|im_end|>"]}, r"'<\|im_end\|>', which is a token of the processor"),
    ({"model.new_tokens": "from_processor"}, "the model has rows for all tokens"),
    ({"run.storage_path": "s3://bucket/run"}, "accepted: a folder that all nodes share"),
    ({"run.storage_path": "model"}, "folder of the model with new tokens, has other content"),
    ({"model.train": {"language_model": {"lora": {"targets": ["lm_head"]}}}},
     "is of class AdaptedLinear; accepted: nn.Linear"),
])  # fmt: skip
def test_unsupported_new_tokens_are_rejected_by_name(tmp_path, rows, changes, why):
    file = configuration(tmp_path, UNTIED, rows)
    if changes.get("run.storage_path") == "model":
        (tmp_path / "run" / "model").mkdir(parents=True)
        changes = {}
    own = [f"{name}={json.dumps(value)}" for name, value in changes.items()]
    with pytest.raises((ConfigError, ModelError), match=why):
        build_model(load_config(file, own))


def test_a_run_keeps_its_new_tokens(tmp_path, rows):
    file = configuration(tmp_path, UNTIED, rows)
    build_model(load_config(file))
    build_model(load_config(file))
    with pytest.raises(ConfigError, match=r"made with new_tokens \['<point>'.*now it is \['<a>'\]"):
        build_model(load_config(file, ['model.new_tokens=["<a>"]']))
    with pytest.raises(ConfigError, match="was made with model .*qwen2_5_vl.*gemma3"):
        own = f"data.processor={tiny(UNTIED)[0]}"
        build_model(load_config(file, [f"model.path={tiny(TIED)[0]}", own]))


def test_models_of_parts_reject_new_tokens(tmp_path, rows):
    file = configuration(tmp_path, UNTIED, rows)
    values = yaml.safe_load(file.read_text())
    values["model"] = {"language_model": {"path": tiny(UNTIED)[0]}, "new_tokens": NEW}
    values["data"]["tokenizer"] = tiny(UNTIED)[0]
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match="new_tokens is given; accepted for a Hugging Face VLM"):
        load_config(file)
