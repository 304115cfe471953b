"""Run that generates texts for evaluation.

Losses are unchanged; it writes metrics and a table, keeps the best checkpoint, and stops early.
"""

import json
import math
from pathlib import Path

import pytest

from raymm.config.build import build_model, build_plan
from raymm.config.sections import load_config
from raymm.monitor.metrics import read_metrics
from raymm.storage.checkpoint import CheckpointStore
from raymm.training.trainer import Trainer
from tests.support.tiny_run import curve

METRICS = ["exact_match", "anls", "wer", "perplexity", "tests.support.text_functions:length"]


@pytest.fixture
def changes(inputs):
    return {
        "data.heldout": str(inputs / "heldout.jsonl"), "run.steps": 6,
        "run.checkpoint_every": 2, "run.keep_checkpoints": 1,
    }


def evaluations(run) -> list[dict]:
    return [row for row in read_metrics(run / "metrics.jsonl") if "texts" in row]


def test_texts_evaluated_in_training(finished, raymm, inputs, changes, make_config, tmp_path):
    evaluate = {
        "every": 3, "generate": {"max_tokens": 5}, "metrics": METRICS, "samples": 5,
        "best": "perplexity",
    }
    run = tmp_path / "run"
    code, text = raymm("train", make_config({**changes, "run.evaluate": evaluate}))
    assert code == 0, text
    assert curve(run) == curve(finished.path)[:6]

    rows = evaluations(run)
    assert [row["step"] for row in rows] == [0, 3, 6]
    for row in rows:
        assert row["texts"] == 5 and {f"heldout_{name}" for name in METRICS} <= set(row)
        assert 0 <= row["heldout_exact_match"] <= row["heldout_anls"] <= 1
        assert 0 <= row["heldout_tests.support.text_functions:length"] <= 5
    assert f"step     3  5 texts: exact_match {rows[1]['heldout_exact_match']:.4g}" in text
    page = (run / rows[-1]["table"]).read_text()
    assert page.count("<tr>") == 6 and "data:image/png" in page and "what is this" in page
    lines = (run / "evaluations/step-00000006.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [f"heldout-{n}" for n in ids(lines)]

    written = {row["id"]: row["text"] for row in map(json.loads, lines)}
    image = next(name for name in written if name != "heldout-0")
    code, text = raymm(
        "generate", str(tmp_path / "config.yaml"), "--prompt", "what is this",
        "--prompt", "what is this", "--max-tokens", "5",
        "--item", f"vision={inputs / image}.png",
    )
    assert code == 0 and text.count(f"> what is this\n{written[image]}\n") == 2, text

    best = min(rows[1:], key=lambda row: row["heldout_perplexity"])
    assert json.loads((run / "best.json").read_text()) == {
        "step": best["step"], "metric": "perplexity", "value": best["heldout_perplexity"],
        "start": rows[0]["heldout_perplexity"],
    }
    kept = [Path(folder).name for folder in CheckpointStore(run).committed()]
    assert "step-00000006" in kept
    assert f"step-{best['step']:08d}" in kept
    assert math.isfinite(best["heldout_perplexity"])


def test_the_best_checkpoint_survives_a_resumption(
    ray_cluster, raymm, changes, make_config, tmp_path
):
    """Check that it is kept and named, though checkpoints are saved before the next evaluation."""
    evaluate = {
        "every": 2, "generate": {"max_tokens": 1},
        "metrics": ["tests.support.text_functions:length"],
        "samples": 1, "best": "tests.support.text_functions:length",
    }
    values = {**changes, "run.evaluate": evaluate, "run.steps": 2}
    assert raymm("train", make_config(values))[0] == 0
    run = tmp_path / "run"
    # No evaluation is better than the second, which is the best.
    rows = read_metrics(run / "metrics.jsonl")
    for row in rows:
        if row.get("texts"):
            row["heldout_tests.support.text_functions:length"] = float(row["step"] == 2) * 99
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    later = make_config({**values, "run.evaluate": {**evaluate, "every": 7}, "run.steps": 7})
    config = load_config(later)
    trainer = Trainer(
        build_model(config), build_plan(config, build_model(config)), config.data, config.run,
        optimizer=config.optimizer.build(7), resources=config.resources.for_device,
    )
    result = trainer.fit()
    kept = [Path(folder).name for folder in CheckpointStore(run).committed()]
    assert kept == ["step-00000002", "step-00000007"]
    assert result.best_checkpoint == run / "checkpoints/step-00000002"


def ids(lines: list[str]) -> list[str]:
    return [json.loads(line)["id"].split("-")[1] for line in lines]


def test_an_unusable_held_out_sample_is_skipped(
    ray_cluster, raymm, inputs, changes, make_config, tmp_path
):
    """Skip it if the data section permits that; without usable samples there is no evaluation."""
    file = tmp_path / "heldout.jsonl"
    rows = [json.loads(line) for line in (inputs / "heldout.jsonl").read_text().splitlines()]
    broken = [{**row, "images": [str(tmp_path / "none.png")]} for row in rows]
    for row in rows:
        row["images"] = [str(inputs / image) for image in row["images"]]
    evaluate = {"every": 1, "generate": {"max_tokens": 1}, "metrics": ["exact_match"]}
    config = make_config({
        **changes, "run.steps": 1, "run.evaluate": evaluate, "data.on_error": "skip",
        "data.heldout": str(file), "data.media_folders": [str(inputs), str(tmp_path)],
    })
    file.write_text("".join(json.dumps(row) + "\n" for row in [broken[0], *rows[1:3]]))
    code, text = raymm("train", config)
    assert code == 0, text
    assert [row["texts"] for row in evaluations(tmp_path / "run")] == [2, 2]
    file.write_text("".join(json.dumps(row) + "\n" for row in broken[:2]))
    again = make_config({
        **changes, "run.steps": 1, "run.evaluate": evaluate, "data.on_error": "skip",
        "data.heldout": str(file), "data.media_folders": [str(inputs), str(tmp_path)],
        "run.storage_path": str(tmp_path / "again"),
    })
    code, text = raymm("train", again)
    assert code == 2 and "none of the held-out 2 samples is usable" in " ".join(text.split()), text


def test_a_run_without_improvement_ends(ray_cluster, raymm, changes, make_config, tmp_path):
    evaluate = {
        "every": 1, "generate": {"max_tokens": 1},
        "metrics": ["tests.support.text_functions:length"],
        "samples": 1, "best": "tests.support.text_functions:length", "patience": 2,
        "lower_is_better": True,
    }
    config = make_config({**changes, "run.evaluate": evaluate})
    code, text = raymm("train", config)
    assert code == 0, text
    # At most one is better than the first: no output.
    last = curve(tmp_path / "run")[-1][0]
    assert last in (2, 3, 4) and "did not improve tests.support.text_functions:length" in text
    latest = CheckpointStore(tmp_path / "run").latest()
    assert latest is not None and Path(latest).name == f"step-{last:08d}"
    code, text = raymm("train", config)
    assert code == 0 and f"has taken {last} steps, and the last 2 evaluations did not" in text
    assert curve(tmp_path / "run")[-1][0] == last


def test_early_stopping_ends_the_run_at_a_phase(
    ray_cluster, raymm, changes, make_config, tmp_path
):
    """End before the next phase if the last evaluation of a phase ends the run."""
    evaluate = {
        "every": 1, "generate": {"max_tokens": 1},
        "metrics": ["tests.support.text_functions:always"],
        "samples": 1, "best": "tests.support.text_functions:always", "patience": 2,
    }
    values = {**changes, "run.evaluate": evaluate, "at": {2: {"vision": "frozen"}}}
    code, text = raymm("train", make_config(values))
    assert code == 0, text
    assert "step     2  the run ends: the last 2 evaluations did not improve" in text
    assert "after step 2" not in text and [row[0] for row in curve(tmp_path / "run")] == [1, 2]


def test_what_cannot_be(raymm, changes, make_config):
    for evaluate, words in (
        ({"every": 1, "metrics": ["bleu"]}, "accepted: exact_match, anls, wer, perplexity"),
        ({"every": 1, "best": "wer"}, "accepted: one of metrics"),
        ({"every": 1, "patience": 2}, "patience and lower_is_better need best"),
    ):
        code, text = raymm("train", make_config({**changes, "run.evaluate": evaluate}))
        assert code == 2 and words in " ".join(text.split()), text
    config = make_config({"run.evaluate": {"every": 1}})
    code, text = raymm("train", config)
    assert code == 2 and "run.evaluate needs data.heldout" in " ".join(text.split())
