"""Runs without a configuration: ``run.yaml``, and settings refused before rows are read."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raymm.actors.host.gpus import Gpus
from raymm.cli.main import _check_model, _parsed, main
from raymm.cli.without_config import FolderStart
from raymm.config.sections import load_config
from raymm.data import open_split
from raymm.monitor.metrics import read_metrics
from tests.support.tiny_folders import tiny


def start(monkeypatch, tmp_path, *arguments):
    """Return the values that a command writes, without a run."""
    monkeypatch.chdir(tmp_path)
    folder_start = FolderStart.of(_parsed(["train", *arguments]))
    assert folder_start is not None
    return load_config(folder_start.write())


def text_model(inputs, folder):
    """Save a causal language model with its tokenizer in one folder."""
    for part in ("llama", "tokenizer"):
        shutil.copytree(inputs / part, folder, dirs_exist_ok=True)
    return str(folder)


def test_run_yaml_has_the_effective_values(monkeypatch, tmp_path, capsys):
    model, data = tiny("idefics3")
    given = ["--model", model, "--data", data, "--output", "out"]
    config = start(
        monkeypatch, tmp_path, *given, "--lora", "r=4", "dropout=0.1", "--epochs", "50",
        "--eval-fraction", "0.25", "--set", "data.batch_size=4", "--set", "run.seed=5",
    )
    lora = config.model.train["language_model"].lora
    assert (lora.r, lora.alpha, lora.dropout) == (4, 8.0, 0.1)
    assert config.model.train["projector"] == config.model.train["vision"] == "frozen"
    assert config.optimizer.lr == 1e-4 and config.optimizer.schedule == "cosine"
    assert 0 < config.optimizer.warmup_steps <= 0.05 * config.run.steps
    assert config.data.batch_size == 4 and config.run.seed == 5
    text = Path("out/run.yaml").read_text()
    assert text in capsys.readouterr().out and "batch_size: 4" in text
    again = start(monkeypatch, tmp_path, *given, "--lr", "0.5", "--set", "run.seed=6")
    assert again.optimizer.lr == 0.5 and again.run.seed == 6
    assert again.model == config.model and again.data == config.data


def test_full_training_has_a_lower_rate_and_a_frozen_tower(monkeypatch, tmp_path):
    model, data = tiny("idefics3")
    config = start(monkeypatch, tmp_path, "--model", model, "--data", data)
    assert config.optimizer.lr == 1e-5
    assert config.model.train == {
        "vision": "frozen", "projector": "full", "language_model": "full",
    }
    assert config.data.heldout is None  # no held-out rows for small data sets


def test_held_out_rows_are_never_trained_on(monkeypatch, tmp_path):
    model, data = tiny("idefics3")
    config = start(
        monkeypatch, tmp_path, "--model", model, "--data", data, "--eval-fraction", "0.3",
    )
    ids = [
        {split[i].id for i in range(len(split))}
        for split in (open_split(config.data, name) for name in ("train", "heldout"))
    ]
    assert len(ids[0]) == 8 and len(ids[1]) == 4 and not ids[0] & ids[1]
    assert config.run.eval_every is not None


def test_on_gpus_the_precision_is_bfloat16(monkeypatch, tmp_path):
    model, data = tiny("idefics3")
    gpus = Gpus("580.65.06", (13, 0), ("NVIDIA L4",))
    monkeypatch.setattr("raymm.actors.host.gpus.read_gpus", lambda: gpus)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = start(monkeypatch, tmp_path, "--model", model, "--data", data)
    assert (config.run.device, config.run.precision) == ("cuda", "bf16")


@pytest.mark.parametrize(("options", "reference"), [((), "initial"), (("--lora",), "base")])
def test_pairs_of_answers_train_by_dpo(monkeypatch, tmp_path, inputs, options, reference):
    model = text_model(inputs, tmp_path / "text-model")
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "what is this", "chosen": "a dog", "rejected": "a cat"}\n' * 8)
    config = start(monkeypatch, tmp_path, "--model", model, "--data", str(rows), *options)
    assert config.model.loss is not None and config.model.loss.dpo.reference == reference
    assert config.data.preferences is True


@pytest.mark.parametrize("option", ["model", "data"])
def test_another_run_in_the_same_folder_is_refused(monkeypatch, tmp_path, option, capsys):
    model, data = tiny("idefics3")
    given = {"model": model, "data": data}
    for name, value in given.items():
        (tmp_path / name).symlink_to(value)
    words = ["--model", "model", "--data", "data", "--output", "out"]
    start(monkeypatch, tmp_path, *words)
    written = Path("out/run.yaml").read_text()
    other = tmp_path / "other" / Path(given[option]).name
    other.parent.mkdir()
    if option == "data":
        other.write_bytes(Path(data).read_bytes())
    else:
        other.mkdir()
        (other / "config.json").write_text("{}")
    capsys.readouterr()
    assert main(["train", *words, f"--{option}", str(other)]) == 2
    text = capsys.readouterr().err
    assert str(other) in text and f"/{option}'" in text and "--output" in text
    assert Path("out/run.yaml").read_text() == written
    start(monkeypatch, tmp_path, *words, f"--{option}", str(tmp_path / option))  # the same file
    assert main(["train", *words, "--split", "test"]) == 2
    assert "--split is 'test'" in capsys.readouterr().err
    assert main(["train", *words, f"--{option}", "misspelt"]) == 2
    said = capsys.readouterr().err
    assert f"--{option} is 'misspelt'" in said and "run.yaml" not in said


@pytest.mark.parametrize(("override", "expected"), [
    ("parallel.language_model.pp=40", "pp of 'llm' is 40, but it can be cut into at most"),
    ("optimizer.modules.foo.lr=1", "optimizer.modules has 'foo'"),
    ("planning.device=H900", "device is 'H900'"),
])
def test_impossible_settings_are_refused_before_rows(
    monkeypatch, tmp_path, capsys, override, expected
):
    model, data = tiny("idefics3")
    monkeypatch.chdir(tmp_path)
    words = ["train", "--model", model, "--data", data, "--output", "out", "--set", override]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and "rows" not in printed.out
    assert not Path("out").exists()


def test_settings_that_rows_make_impossible_write_nothing(monkeypatch, tmp_path, capsys):
    model, data = tiny("idefics3")
    words = ["--model", model, "--data", data, "--output", "out"]
    monkeypatch.chdir(tmp_path)
    set_dp = ["--set", "parallel.language_model.dp=7"]
    assert main(["train", *words, *set_dp]) == 2
    assert "dp of 'llm' is 7" in capsys.readouterr().err and not Path("out").exists()
    start(monkeypatch, tmp_path, *words)
    written = Path("out/run.yaml").read_text()
    assert main(["train", *words, *set_dp]) == 2
    assert Path("out/run.yaml").read_text() == written


def test_settings_that_depend_on_rows_are_accepted_before_them(monkeypatch, tmp_path):
    """Check that placeholders for values of rows do not reject what the rows may allow."""
    model, data = tiny("idefics3")
    monkeypatch.chdir(tmp_path)
    for overrides in (
        ["run.eval_every=5"], ["data.microbatches=3"], ["data.batch_size=6"],
        ["parallel.language_model.dp=3"], ["data.modalities.image.part=picture"],
        ["optimizer.schedule=linear", "optimizer.total_steps=100"], ["at={50: {vision: full}}"],
    ):
        words = [word for override in overrides for word in ("--set", override)]
        folder_start = FolderStart.of(_parsed(["train", "--model", model, "--data", data, *words]))
        assert folder_start is not None
        trial = folder_start.trial()
        assert trial is not None
        _check_model(trial)


@pytest.mark.usefixtures("ray_cluster")
def test_a_model_of_text_alone_trains(monkeypatch, tmp_path, inputs, capsys):
    text_model(inputs, tmp_path / "text-model")
    (tmp_path / "rows.jsonl").write_text('{"text": "what is this a dog"}\n' * 8)
    monkeypatch.chdir(tmp_path)
    assert main([
        "train", "--model", "text-model", "--data", "rows.jsonl", "--lora", "--set", "run.steps=2",
        "--set", "run.device=cpu", "--set", "resources={cpus: 0.1}",
    ]) == 0  # fmt: skip
    config = load_config("runs/text-model/run.yaml")
    assert config.model.language_model is not None and config.model.path is None
    rows = read_metrics(tmp_path / "runs/text-model/metrics.jsonl")
    assert len([row for row in rows if "loss" in row]) == 2
    capsys.readouterr()
    pictures = ["--data", str(inputs / "train.jsonl"), "--out", "pictures"]
    assert main(["train", "--model", "text-model", *pictures]) == 2
    assert "has items of image" in capsys.readouterr().err
