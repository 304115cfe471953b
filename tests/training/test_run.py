"""``raymm train``, ``plan`` and ``trace`` on a small real run."""

import json
import math

from raymm.config.sections import load_config
from raymm.monitor.metrics import read_metrics
from raymm.scheduler.plan.plan import Plan
from raymm.scheduler.plan.stage import StageId
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.tiny_run import curve, heldout_rows

PNG = b"\x89PNG\r\n"


def test_a_run_takes_its_steps_and_logs_them(finished):
    rows = [row for row in read_metrics(finished.path / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(math.isfinite(row["loss"]) and row["loss"] > 0 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.2  # random words: it learns their frequencies
    assert all(set(row["stage_busy"]) == {"vision.0", "llm.0", "llm.1"} for row in rows)
    assert all(0 < share <= 1 for row in rows for share in row["stage_busy"].values())
    assert all(row["tokens_per_s"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert {row["skipped"] for row in rows} == {0}
    # Linear warm-up over two steps, then cosine to 0 at total_steps.
    rates = [row["learning_rate"] for row in rows]
    assert rates[:3] == [0.0, 0.005, 0.01]
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[-1] < 1e-3


def test_a_run_evaluates_on_held_out_data(finished):
    rows = heldout_rows(finished.path)
    assert [row["step"] for row in rows] == [0, 12]
    assert rows[1]["heldout_loss"] < rows[0]["heldout_loss"]
    for row in rows:
        wrong = row["heldout_loss_shuffled_vision"]
        assert wrong != row["heldout_loss"]  # other images give other features
        assert row["heldout_gap_vision"] == wrong - row["heldout_loss"]


def test_a_run_leaves_pictures_plan_trace_and_checkpoints(finished):
    for name in ("loss.png", "schedule.png", "plan.png"):
        assert (finished.path / name).read_bytes().startswith(PNG), name
        assert f"{finished.path / name}" in finished.output
    plan = Plan.from_json((finished.path / "plan.json").read_text())
    assert [(s.id, s.rank) for s in plan.stages] == [
        (StageId("vision", 0), 0),
        (StageId("llm", 0), 0),
        (StageId("llm", 1), 1),
    ]
    events = json.loads((finished.path / "trace.json").read_text())["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(processes.values()) == {"predicted", "measured"}
    for pid in processes:
        assert {e["tid"] for e in events if e["ph"] == "X" and e["pid"] == pid} == {0, 1}
    store = CheckpointStore(finished.path)
    assert [read_manifest(folder).step for folder in store.committed()] == [6, 8, 10, 12]


def test_a_run_names_its_checkpoint_and_the_command_that_exports_it(finished):
    *_, checkpoint, export = finished.output.splitlines()
    newest = CheckpointStore(finished.path).latest()
    assert checkpoint.split() == ["checkpoint", str(newest)]
    command = f"raymm export {finished.config} --out {finished.path / 'export'}"
    assert export.partition(":")[2].strip() == command


def test_a_run_prints_its_progress(finished):
    text = finished.output
    assert "3 stages on 2 ranks (cpu), 2 microbatches per step, fp32" in text
    assert "step    12/12  loss " in text and "tokens/s" in text and "busy: vision.0" in text
    assert "held-out loss" in text and "with shuffled vision" in text


def test_set_changes_the_configuration(make_config):
    config = load_config(
        make_config(),
        ["run.steps=5", "optimizer.betas=[0.8, 0.9]", "run.storage_path=elsewhere",
         "resources.custom={fast: 1}", "run.eval_every=null"],
    )
    assert config.run.steps == 5 and config.run.storage_path == "elsewhere"
    assert config.optimizer.betas == (0.8, 0.9) and config.resources.custom == {"fast": 1.0}
    assert config.run.eval_every is None


def test_variables_and_home_are_expanded(make_config, monkeypatch):
    monkeypatch.setenv("RAYMM_TEST_FOLDER", "/somewhere")
    monkeypatch.setenv("HOME", "/home/someone")
    overrides = [
        "run.storage_path=${RAYMM_TEST_FOLDER}/run", "data.train=${NOT_SET_X:-~/d}/t.jsonl",
    ]
    config = load_config(make_config(), overrides)
    assert config.run.storage_path == "/somewhere/run"
    assert [source.path for source in config.data.train] == ["/home/someone/d/t.jsonl"]


def test_trace_summarises_the_last_timeline(finished, raymm, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, text = raymm("trace", str(finished.path))
    assert code == 0
    for expected in ("predicted", "measured", "rank 0: vision.0 llm.0", "rank 1: llm.1", "bubble"):
        assert expected in text
    assert text.count("rank 1: llm.1") == 2  # predicted and measured


def test_trace_of_a_folder_without_one(raymm, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    code, text = raymm("trace", str(tmp_path))
    assert code == 2 and "run_folder is" in text and str(tmp_path) in text and "trace.json" in text


def test_an_edited_plan_runs_and_gives_the_same_losses(finished, raymm, make_config, tmp_path):
    """Move the same stages to other ranks, and resume a checkpoint of the first plan."""
    code, text = raymm("plan", finished.config, "--out", str(tmp_path / "plan"))
    assert code == 0 and "plan.json" in text
    file = tmp_path / "plan" / "plan.json"
    plan = json.loads(file.read_text())
    for stage in plan["stages"]:
        stage["rank"] = 0
    file.write_text(json.dumps(plan))
    run = finished.copy_until(tmp_path / "run", 10)
    code, text = raymm("train", make_config({"parallel": {"plan": str(file)}}))
    assert code == 0 and "3 stages on 1 rank " in text and "resuming from" in text
    for mine, original in zip(curve(run), curve(finished.path), strict=True):
        assert mine[0] == original[0]
        assert abs(mine[1] - original[1]) < 1e-5 and abs(mine[2] - original[2]) < 1e-4


def test_a_finished_run_starts_no_process(finished, raymm, no_new_actors):
    before = curve(finished.path)
    code, text = raymm("train", finished.config, "--set", "run.steps=7")
    assert code == 0 and "nothing to do" in text and "has taken 12 steps, run.steps is 7" in text
    assert curve(finished.path) == before
