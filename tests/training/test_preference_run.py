"""Run on pairs of answers: it resumes bit for bit, and learns which answer is better."""

import json
import shutil

import pytest

from raymm.storage.checkpoint import CheckpointStore
from tests.support.tiny_run import curve, heldout_rows


@pytest.fixture
def changes(inputs, tmp_path):
    """Return settings: adapters on a language model, frozen tower, known answers."""
    for name in ("train", "heldout"):
        rows = [json.loads(line) for line in (inputs / f"{name}.jsonl").read_text().splitlines()]
        for row in rows:
            asked, answer = row.pop("messages")
            wrong = {"role": "assistant", "content": "cat cat yes"}
            row |= {"prompt": [asked], "chosen": [answer], "rejected": [wrong]}
            row["images"] = [str(inputs / image) for image in row["images"]]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    llm, vision = "model.language_model", "model.encoders.vision"
    return {
        f"{llm}.config": None, f"{llm}.path": str(inputs / "llama"),
        f"{llm}.train": {"lora": {"r": 2}}, f"{vision}.train": "frozen",
        f"{vision}.projector_train": "frozen", "model.loss": {"dpo": {"beta": 0.5}},
        "data.train": str(tmp_path / "train.jsonl"), "data.media_folders": [str(inputs)],
        "data.heldout": str(tmp_path / "heldout.jsonl"),
        "run.steps": 6, "run.eval_every": 3, "run.eval_shuffled": False, "run.keep_checkpoints": 4,
    }


def test_a_preference_run_is_evaluated_and_resumes(
    ray_cluster, raymm, changes, make_config, tmp_path
):
    """Check that evaluations of pairs equal the held-out loss, and that the best one is kept."""
    asked = {
        "every": 3, "generate": {"max_tokens": 4}, "best": "rewards/margins",
        "metrics": ["anls", "preference_loss", "rewards/margins", "rewards/accuracies"],
    }
    config, run = make_config({**changes, "run.evaluate": asked}), tmp_path / "run"
    code, text = raymm("train", config)
    assert code == 0, text
    whole, losses = curve(run), [row["heldout_loss"] for row in heldout_rows(run)]
    # Adapters are initially zero: the model equals its reference, and the loss of a pair is log 2.
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[-1] < losses[0]
    first, *_, last = heldout_rows(run)
    assert first["heldout_rewards/margins"] == pytest.approx(0, abs=1e-5)
    chosen, rejected = last["heldout_rewards/chosen"], last["heldout_rewards/rejected"]
    assert last["heldout_rewards/margins"] == pytest.approx(chosen - rejected, abs=1e-6)
    assert chosen > rejected and 0.5 < last["heldout_rewards/accuracies"] <= 1
    assert [row[-1] for row in whole] == [4] * 6  # pairs
    check_evaluations(run)
    code, text = raymm("generate", config, "--prompt", "what is this", "--max-tokens", "2")
    assert code == 0 and "> what is this\n" in text, text
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole


def test_a_fully_trained_preference_run_resumes(ray_cluster, raymm, changes, make_config, tmp_path):
    """Check that the reference is the initial model, also after a resumption."""
    full = {
        "model.language_model.train": "full", "model.encoders.vision.projector_train": "full",
        "model.loss": {"dpo": {"beta": 0.5, "reference": "initial"}},
    }
    config, run = make_config({**changes, **full}), tmp_path / "run"
    code, text = raymm("train", config)
    assert code == 0, text
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    whole, losses = curve(run), [row["heldout_loss"] for row in heldout_rows(run)]
    assert losses[0] == pytest.approx(0.693147, abs=1e-5) and losses[-1] < losses[0]
    assert steps[0]["rewards/margins"] == pytest.approx(0, abs=1e-5)
    assert steps[-1]["rewards/margins"] > 0 and 0 <= steps[-1]["rewards/accuracies"] <= 1
    for folder in CheckpointStore(run).committed():
        if folder.name != "step-00000002":
            shutil.rmtree(folder)
    kept = (run / "references.json").read_text()
    (run / "references.json").unlink()
    code, text = raymm("train", config)
    assert code == 2 and "references.json" in text
    (run / "references.json").write_text(kept)
    assert raymm("train", config)[0] == 0
    assert curve(run) == whole


def check_evaluations(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    told = {row["step"]: row for row in rows if "texts" in row}
    losses = {row["step"]: row for row in rows if "heldout_loss" in row}
    assert sorted(told) == sorted(losses) == [0, 3, 6]
    for step, row in told.items():
        assert row["texts"] == 6 and 0 <= row["heldout_anls"] <= 1
        due = losses[step]
        assert row["heldout_preference_loss"] == pytest.approx(due["heldout_loss"], rel=1e-5)
        for name in ("heldout_rewards/margins", "heldout_rewards/accuracies"):
            assert row[name] == pytest.approx(due[name], rel=1e-4, abs=1e-6)
    best = json.loads((run / "best.json").read_text())
    margins = {step: row["heldout_rewards/margins"] for step, row in told.items()}
    assert best["step"] == max(margins, key=lambda step: margins[step]) > 0


@pytest.mark.parametrize(("more", "says"), [
    ({"model.language_model.train": "full"}, "not adapters"),
    ({"run.evaluate": {"every": 1, "metrics": ["perplexity"]}}, "'perplexity', but the model's"),
    ({"data.preferences": False}, "data.preferences is False"),
])  # fmt: skip
def test_what_cannot_be(raymm, changes, make_config, more, says):
    code, text = raymm("train", make_config({**changes, **more}))
    assert code == 2 and says in " ".join(text.split()), text
