"""Metrics have the loss of every source, where there are several."""

import pytest
from tiny_run import read_metrics


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


def test_a_source_alone_is_not_told(finished):
    assert not any("source_losses" in row for row in read_metrics(finished.path / "metrics.jsonl"))
