"""A resumed run is compared with the run that wrote its checkpoint, in both directions."""

import functools
import json
import os
import shutil

import numpy
import pytest
import torch

from raymm.config.build import build_model
from raymm.config.sections import load_config
from raymm.data import open_split
from raymm.errors import CheckpointError
from raymm.monitor.metrics import read_metrics
from raymm.storage.code_digest import code_digest
from raymm.storage.manifest import Manifest
from raymm.storage.resuming import RULES, compare
from raymm.storage.run_description import describe_run
from tests.support import run_processors
from tests.support.tiny_run import change, curve, settings, write_config


@pytest.fixture
def folder(inputs, tmp_path):
    """Return a folder of inputs for one test."""
    return shutil.copytree(inputs, tmp_path / "inputs", dirs_exist_ok=True)


@pytest.fixture
def described(folder, tmp_path):
    """Return a function that describes a run with changed values of the configuration."""

    def describe(changes=None):
        values = settings(folder, tmp_path / "run", 12)
        change(values, "data.heldout", str(folder / "heldout.jsonl"))
        change(values, "run.precision", "fp32")  # the value of "auto" on this device
        for path, value in (changes or {}).items():
            change(values, path, value)
        config = load_config(write_config(values, tmp_path / "described.yaml"))
        splits = {split: open_split(config.data, split) for split in ("train", "heldout")}
        optimizer = config.optimizer.build(config.run.steps)
        return describe_run(config.run, build_model(config), optimizer, config.data, splits)

    return describe


def manifest_of(run):
    return Manifest(step=10, index={}, files={}, plan={}, run=run, trainer={})


def compared(tmp_path, was, now, allowed=()):
    """Return the messages, or the rejection."""
    try:
        return compare(tmp_path, manifest_of(was), now, allowed), ""
    except CheckpointError as error:
        return [], str(error)


def test_an_unchanged_run_reports_nothing(described, tmp_path):
    was = described()
    assert json.loads(json.dumps(was)) == was
    assert compared(tmp_path, was, described()) == ([], "")


def test_raymm_policies_are_compared_without_a_path(described, tmp_path):
    """Check that earlier checkpoints, which record file paths, are compared without them."""
    now = described({"model.merge": {"vision": "<image>"}})
    assert now["model.merge"]["name"] == "raymm:ReplaceTokens"
    filed = "raymm.actors.modules.merge:ReplaceTokens"
    was = {**now, "model.merge": {**now["model.merge"], "name": filed}}
    assert compared(tmp_path, was, now) == ([], "")
    other = {**was, "model.merge": {**was["model.merge"], "name": "mine.merge:ReplaceTokens"}}
    assert "model.merge.name is 'raymm:ReplaceTokens'" in compared(tmp_path, other, now)[1]


LLM = "model.language_model"

# Per case: changes, the field for `run.allow_changes`, and a part of the error.
REFUSED = {
    "seed": ({"run.seed": 4}, "run.seed", "run.seed is 4, was 3"),
    "order": ({"data.seed": 1}, "data.seed", "data.seed is 1, was 0"),
    "decay of everything": (
        {"optimizer.no_decay": []}, "optimizer.no_decay", "optimizer.no_decay is [], was None",
    ),
    "no order": ({"data.shuffle": False}, "data.shuffle", "data.shuffle is False, was True"),
    "rotary base": (
        {f"{LLM}.config.rope_parameters": {"rope_type": "default", "rope_theta": 5.0}},
        "model.llm.config.rope_parameters", "rope_theta is 5.0, was 10000.0",
    ),
    "heads": (
        {f"{LLM}.config.num_attention_heads": 1, f"{LLM}.config.head_dim": 16},
        None, "layers.0.self_attn.q_proj.weight is float32 [16, 32] trained in the model, but "
        "float32 [32, 32] trained in the checkpoint",
    ),
    "merge": (
        {"model.merge": {"vision": "<image>"}}, "model.merge",
        "model.merge.name is 'raymm:ReplaceTokens', was 'raymm:Prepend'",
    ),
    "mask": (
        {"model.mask": "multimodal"}, "model.mask", "model.mask is 'raymm:",
    ),
    "fewer layers": (
        {f"{LLM}.config.num_hidden_layers": 1, "parallel": {}}, None,
        "layers.1.self_attn.q_proj.weight is in the checkpoint, but not in the model",
    ),
    "more layers": (
        {f"{LLM}.config.num_hidden_layers": 3}, None,
        "layers.2.self_attn.q_proj.weight is in the model, but not in the checkpoint",
    ),
    "untied": (
        {f"{LLM}.config.tie_word_embeddings": False}, "model.llm.config.tie_word_embeddings",
        "tie_word_embeddings is False, was True",
    ),
    "frozen": (
        {"model.encoders.vision.train": "frozen"}, None,
        "frozen in the model, but float32 [16] trained in the checkpoint",
    ),
    "projector": (
        {"model.encoders.vision.projector": "linear"}, None,
        "vision/projector.layers.2.bias is in the checkpoint, but not in the model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_forbidden_changes_are_rejected_with_both_values(described, tmp_path, case):
    changes, field, says = REFUSED[case]
    was, now = described(), described(changes)
    _, error = compared(tmp_path, was, now)
    assert f"cannot resume from {tmp_path}" in error and says in error, error
    assert "set another run.storage_path to start a new run" in error
    _, back = compared(tmp_path, now, was)
    assert back
    if field is None:  # no option helps: something would be lost, or invented
        assert "allow_changes" not in error and "raymm export" in error
        assert compared(tmp_path, was, now, ["model.parameters", "model.*"])[1]
        return
    assert f"run.allow_changes: [{field}" in error
    said, error = compared(tmp_path, was, now, [*REFUSED, *now])
    assert not error and any(says in line for line in said)


def test_adapters_without_rslora_resume_from_earlier_versions(described, tmp_path):
    """Check earlier checkpoints, which lack the field."""
    was = described({f"{LLM}.train": {"lora": {"r": 2}}})
    assert "model.llm.lora.use_rslora" not in was and "model.llm.lora.r" in was
    now = described({f"{LLM}.train": {"lora": {"r": 2, "use_rslora": True}}})
    assert "use_rslora is True, was not there" in compared(tmp_path, was, now)[1]


@pytest.mark.parametrize(("changes", "says"), [
    ({"run.steps": 20, "optimizer.total_steps": 20},
     ["run.steps is 20, was 12", "optimizer.total_steps is 20, was 12"]),
    ({"optimizer.lr": 0.5}, ["optimizer.lr is 0.5, was 0.01"]),
    ({"data.batch_size": 8}, ["data.batch_size is 8, was 4 (the epoch continues at the same"]),
    ({"data.microbatches": 4}, ["data.microbatches is 4, was 2"]),
    ({"data.max_length": 16}, ["data.max_length is 16, was 32"]),
    ({"data.batching": "balanced"}, ["data.batching.method is 'balanced', was 'random'"]),
    ({"data.modalities.vision.processor": "tests.support.run_processors:slow_image"},
     ["processor is 'tests.support.run_processors:slow_image', "
      "was 'tests.support.run_processors:image'"]),
    ({"model.packing": True}, ["model.packing is True, was False"]),
    ({"run.precision": "bf16"}, ["run.precision is 'bf16', was 'fp32'"]),
    ({f"{LLM}.config.attention_dropout": 0.25}, ["attention_dropout is 0.25, was 0.0"]),
    ({"data.num_workers": 3, "run.log_every": 5, "run.checkpoint_every": 1, "resources.cpus": 0.1,
      "parallel": {}}, []),
])  # fmt: skip
def test_allowed_changes_are_reported_with_both_values(described, tmp_path, changes, says):
    said, error = compared(tmp_path, described(), described(changes))
    assert not error and len(said) == len(says)
    for line, text in zip(sorted(said), sorted(says), strict=True):
        assert line.startswith("changed since step 10: ") and text in line


def function(body):
    """Return a function as a user's file would define it."""
    names = {"torch": torch, "numpy": numpy, "functools": functools}
    exec(f"f = {body}", names)
    return names["f"]


def test_code_is_compared_if_names_are_equal(described, tmp_path, monkeypatch):
    """Edit the configuration's callback; the field contains only its name."""
    field = "model.encoders.vision.preprocess"
    changes = {field: "tests.support.run_processors:edited"}
    runs = []
    for body in ("lambda x: x", "lambda y: y", "lambda x: dict(x)"):
        monkeypatch.setattr(run_processors, "edited", function(body), raising=False)
        runs.append(described(changes))
    assert compared(tmp_path, runs[0], runs[1]) == ([], "")
    said, error = compared(tmp_path, runs[1], runs[2])
    assert not error and len(said) == 1
    assert "model.vision.preprocess.code is '" in said[0]
    assert "or a value that it holds, has changed" in said[0]
    before = {name: value for name, value in runs[1].items() if not name.endswith(".code")}
    assert compared(tmp_path, before, runs[2]) == ([], "")
    # without any callback, the name itself is rejected
    assert compared(tmp_path, runs[1], described())[1]


@pytest.mark.parametrize("bodies", [
    ("lambda x: x + 1", "lambda x: x + 2"),
    ("lambda x: x.sin()", "lambda x: x.cos()"),
    ("lambda x, by=1: x", "lambda x, by=2: x"),
    ("functools.partial(max, 1)", "functools.partial(max, 2)"),
    ("functools.partial(max, 1)", "functools.partial(min, 1)"),
    ("functools.partial(max, key=lambda x: x)", "functools.partial(max, key=lambda x: -x)"),
    ("functools.partial(torch.add, torch.ones(2))", "functools.partial(torch.add, torch.ones(3))"),
    ("functools.partial(torch.add, torch.ones(2))", "functools.partial(torch.add, torch.zeros(2))"),
    ("functools.partial(max, numpy.ones(2))", "functools.partial(max, numpy.zeros(2))"),
    ("(lambda by: lambda x: x + by)(1)", "(lambda by: lambda x: x + by)(2)"),
    ("{'a': 1, 'b': 2}.get", "{'a': 1, 'b': 3}.get"),
    ("lambda x: [y for y in x]", "lambda x: [-y for y in x]"),
])  # fmt: skip
def test_digests_cover_a_functions_code_and_values(bodies):
    first, second = bodies
    assert code_digest(function(first)) == code_digest(function(f" ({first})  # a comment"))
    assert code_digest(function(first)) != code_digest(function(second))


def rewrite(file, before, after):
    text = file.read_text()
    assert before in text
    file.write_text(text.replace(before, after, 1))


def add(file, text):
    file.write_text(file.read_text() + text)


# Per case: changes of files, the field, and a part of the message.
FILES = {
    "a row more": (
        lambda f: add(f / "train.jsonl", '{"text": "a"}\n'),
        "data.train", "data.train.0.rows is 14, was 13",
    ),
    "another word of the same length": (
        lambda f: rewrite(f / "train.jsonl", "what is this", "that is this"),
        "data.train", "data.train.0.files.train.jsonl is '",
    ),
    "a token less": (
        lambda f: rewrite(f / "tokenizer/tokenizer.json", '"dog"', '"fox"'),
        "data.tokenizer", "data.tokenizer.files.tokenizer.json is '",
    ),
    "another template": (
        lambda f: rewrite(next((f / "tokenizer").glob("chat_template*")), "im_start", "im_end"),
        "data.tokenizer", "data.tokenizer.files.chat_template",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_changed_files_are_rejected(described, folder, tmp_path, case):
    edit, field, says = FILES[case]
    was = described()
    edit(folder)
    _, error = compared(tmp_path, was, now := described())
    assert says in error and f"run.allow_changes: [{field}]" in error and "times" not in error
    assert compared(tmp_path, was, now, [field])[0]


def test_copied_files_are_equal(described, folder, tmp_path):
    was = described()
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    said, error = compared(tmp_path, was, described())
    assert not error and all("contents are the same" in s or "is the same" in s for s in said)
    assert {line.split()[4] for line in said} == {
        "data.train.0.times", "data.heldout.0.times", "data.tokenizer.times",
    }
    (folder / "heldout.jsonl").write_text((folder / "train.jsonl").read_text())
    said, error = compared(tmp_path, was, described())
    assert not error and any("held-out losses cannot be compared" in line for line in said)


def test_frozen_weights_from_a_folder_are_compared(described, folder, tmp_path):
    """Check them by content, as checkpoints do not contain them."""
    frozen = {"model.encoders.vision.train": "frozen"}
    was = described(frozen)
    weights = folder / "siglip/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    _, error = compared(tmp_path, was, described(frozen))
    assert "model.vision.weights.files.model.safetensors is '" in error
    assert "frozen weights, which are not in checkpoints, would change" in error
    assert "weights" not in "".join(compared(tmp_path, described(), described())[0])


def test_every_field_of_a_run_has_a_rule(described):
    from fnmatch import fnmatchcase

    fields = described({"model.encoders.vision.train": "frozen"})
    patterns = [rule.fields for rule in RULES]
    assert [f for f in fields if not any(fnmatchcase(f, one) for one in patterns)] == []


# Through the command line.


def test_a_model_without_a_layer_is_rejected_before_the_start(
    finished, raymm, make_config, tmp_path, no_new_actors
):
    run = finished.copy_until(tmp_path / "run", 10)
    layers = "model.language_model.config.num_hidden_layers"
    one = {"language_model": {"ranks": [0]}, "encoders": {"vision": {"ranks": [0]}}}
    for count, says in ((1, "is in the checkpoint, but not"), (3, "is in the model, but not in")):
        code, text = raymm("train", make_config({layers: count, "parallel": one}))
        assert code == 2 and "CheckpointError" in text and says in text and "Traceback" not in text
    code, text = raymm(
        "export", make_config({layers: 1, "parallel": one}), "--out", str(tmp_path / "out")
    )
    assert code == 2 and "CheckpointError" in text and "tensor(s) that this model lacks" in text
    assert "llm/module.model.layers.1." in text and not (tmp_path / "out").exists()
    assert curve(run) == curve(finished.path)


def test_changes_are_printed_and_logged(finished, raymm, make_config, tmp_path):
    """Resume with changed settings that the option allows."""
    run = finished.copy_until(tmp_path / "run", 10)
    config = make_config({"optimizer.lr": 0.02, "run.seed": 4})
    code, text = raymm("train", config)
    assert code == 2 and "run.seed is 4, was 3" in text and "optimizer.lr" not in text
    code, text = raymm("train", config, "--set", "run.allow_changes=[run.seed]")
    assert code == 0
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "changed" in row]
    assert len(rows) == 1 and rows[0]["step"] == 10
    for says in ("optimizer.lr is 0.02, was 0.01", "run.seed is 4, was 3"):
        assert any(says in line for line in rows[0]["changed"]) and says in text
    # The next checkpoint has the new settings.
    longer = ("--set", "run.steps=13", "--set", "optimizer.total_steps=13")
    code, text = raymm("train", config, *longer)
    assert code == 0 and "run.steps is 13, was 12" in text and "run.seed" not in text
