"""Metrics have the loss of every source if there are several."""

import math

import pytest

from tests.support.tiny_run import heldout_rows, read_metrics


def test_metrics_and_weights_of_two_sources(inputs, make_config, raymm, tmp_path, ray_cluster):
    lines = (inputs / "train.jsonl").read_text().splitlines(keepends=True)
    sources = []
    for name, part in (("first", lines[:6]), ("second", lines[6:])):
        file = inputs / f"{name}-part.jsonl"
        file.write_text("".join(part))
        sources.append({"path": str(file), "name": name})
    sources[0]["weight"], sources[1]["weight"] = 1.0, {0: 1.0, 2: 0.0}
    config = make_config({"data.train": sources, "run.steps": 3, "run.log_samples": True})
    code, text = raymm("train", config)
    assert code == 0, text
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [sorted(row["source_losses"]) for row in rows] == [["first", "second"]] * 2 + [["first"]]
    for row in rows:
        losses, counts = row["source_losses"], row["source_label_tokens"]
        assert sum(counts.values()) == row["label_tokens"]
        total = sum(losses[name] * counts[name] for name in losses)
        assert total / row["label_tokens"] == pytest.approx(row["loss"], rel=1e-5)


def test_each_held_out_source_has_its_loss(inputs, make_config, raymm, tmp_path, ray_cluster):
    """Compare each with the held-out loss of a run with this source alone."""
    lines = (inputs / "heldout.jsonl").read_text().splitlines(keepends=True)
    parts = {"first": lines[:2], "second": lines[2:]}
    sources = []
    for name, part in parts.items():
        file = inputs / f"{name}-heldout.jsonl"
        file.write_text("".join(part))
        sources.append({"path": str(file), "name": name})
    evaluate = {"every": 1, "generate": {"max_tokens": 1}, "metrics": ["perplexity"]}
    asked = {
        "run.steps": 1, "run.eval_every": 1, "run.eval_shuffled": False, "run.evaluate": evaluate,
    }

    def rows(folder, heldout):
        config = make_config({
            **asked, "run.storage_path": str(tmp_path / folder), "data.heldout": heldout,
        })
        code, text = raymm("train", config)
        assert code == 0, text
        return heldout_rows(tmp_path / folder)

    alone = rows("alone", sources[:1])
    assert not any("heldout_source_losses" in row for row in alone)
    for row, first in zip(rows("both", sources), alone, strict=True):
        losses, counts = row["heldout_source_losses"], row["heldout_source_label_tokens"]
        assert losses["first"] == pytest.approx(first["heldout_loss"], rel=1e-5)
        assert sorted(losses) == sorted(counts) == ["first", "second"]
        mean = sum(losses[name] * counts[name] for name in losses) / sum(counts.values())
        assert mean == pytest.approx(row["heldout_loss"], rel=1e-5)
    # Texts cover all sources.
    texts = [r for r in read_metrics(tmp_path / "both" / "metrics.jsonl") if "texts" in r]
    for row, told in zip(heldout_rows(tmp_path / "both"), texts, strict=True):
        assert told["texts"] == len(lines)
        assert math.log(told["heldout_perplexity"]) == pytest.approx(row["heldout_loss"], rel=1e-4)


def test_a_single_source_has_no_separate_loss(finished):
    assert not any("source_losses" in row for row in read_metrics(finished.path / "metrics.jsonl"))
