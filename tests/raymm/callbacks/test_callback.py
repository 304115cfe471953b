"""Callbacks and loggers see the whole run, and cannot change it."""

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from raymm.callbacks.callback import scalars
from raymm.callbacks.handler import named_callbacks
from raymm.callbacks.ray_metrics import METRICS
from raymm.cli.main import EXIT_REPEATS
from raymm.errors import ConfigError
from raymm.monitor.metrics import read_metrics
from tests.support.scraping import scrape
from tests.support.tiny_run import STEPS, curve
from tests.support.watching_callbacks import CALLS

RECORDER = "tests.support.watching_callbacks:Recorder"
FAILING = "tests.support.watching_callbacks:Failing"


def loggers(tmp_path):
    return [
        "tensorboard", {"wandb": {"mode": "offline"}},
        {"mlflow": {"tracking_uri": f"file://{tmp_path / 'mlflow'}", "experiment": "tiny"}},
    ]


def wandb_records(file):
    """Yield the records of an offline run.

    The format is LevelDB's log: blocks of 32 KiB of fragments with headers of 7 bytes (checksum,
    length, 1 full, 2 first, 3 middle, 4 last), after wandb's own 7 bytes.
    """
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 2**15 - at % 2**15 < 7:  # the rest of the block is too small for a header
            at += 2**15 - at % 2**15
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record = Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def wandb_losses(folder):
    """Return the loss by step in all files of an offline run, and the ids of the run."""
    losses, ids = {}, set()
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for record in wandb_records(file):
            if record.run.run_id:
                ids.add(record.run.run_id)
            row = {i.key or "/".join(i.nested_key): i.value_json for i in record.history.item}
            if "loss" in row:
                losses[int(row["step"])] = float(row["loss"])
    return losses, ids


@pytest.fixture
def calls():
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def test_callbacks_and_loggers_do_not_change_a_resumed_run(
    finished, make_config, raymm, tmp_path, inputs, calls, monkeypatch
):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    changes = {
        "data.heldout": str(inputs / "heldout.jsonl"), "run.eval_every": STEPS,
        "run.callbacks": [
            {FAILING: {"at": 2}}, RECORDER, *loggers(tmp_path),
        ],
        "optimizer.total_steps": STEPS, "run.storage_path": str(tmp_path / "watched"),
    }
    _, text = raymm("train", make_config({**changes, "run.steps": 7}))
    assert "callback Failing failed in on_step: ValueError: the disk of the logger is full" in text
    run = tmp_path / "watched"
    trace = (run / "callback-Failing.txt").read_text()
    assert "watching_callbacks.py" in trace and trace.rstrip().endswith("logger is full")
    assert [step for kind, step in calls if kind == "failing"] == [1, 2]
    assert [kind for kind, _ in calls if kind in ("start", "end")] == ["start", "end"]
    raymm("train", make_config({**changes, "run.steps": STEPS}))
    assert curve(run) == curve(finished.path)

    def told(what):
        return [value for kind, value in calls if kind == what]

    rows = read_metrics(run / "metrics.jsonl")
    steps = [row for row in rows if "loss" in row]
    assert told("step") == steps and [row["step"] for row in steps] == [*range(1, STEPS + 1)]
    assert [row["step"] for row in told("evaluation")] == [0, 7, STEPS]
    assert [checkpoint.step for checkpoint in told("checkpoint")] == [2, 4, 6, 7, 8, 10, STEPS]
    assert all(checkpoint.folder.name == f"step-{checkpoint.step:08d}" and checkpoint.seconds > 0
               for checkpoint in told("checkpoint"))
    first, second = told("start")
    assert (first.first_step, first.steps, second.first_step) == (0, 7, 7)
    assert first.config["optimizer.lr"] and set(first.modules) == set(steps[0]["stage_busy"])
    assert [end.status for end in told("end")] == ["finished", "finished"]

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    for name in ("loss", "tokens_per_s", "peak_memory_bytes/max"):
        values = {event.step: event.value for event in events.Scalars(name)}
        assert values == pytest.approx({row["step"]: scalars(row)[name] for row in steps}, rel=1e-6)
    losses, ids = wandb_losses(run)
    assert len(ids) == 1  # the resumed run has the same id
    assert losses == {row["step"]: row["loss"] for row in steps}
    client = MlflowClient(f"file://{tmp_path / 'mlflow'}")
    found = client.search_runs([client.get_experiment_by_name("tiny").experiment_id])
    assert len(found) == 1 and found[0].info.status == "FINISHED"
    history = client.get_metric_history(found[0].info.run_id, "loss")
    assert {m.step: m.value for m in history} == {row["step"]: row["loss"] for row in steps}
    assert found[0].data.params["optimizer.lr"] == str(first.config["optimizer.lr"])

    tags, last = (("run", "watched"),), steps[-1]
    evaluation = [row for row in rows if "heldout_loss" in row][-1]
    wanted = {
        ("raymm_step", tags): STEPS, ("raymm_loss", tags): last["loss"], ("raymm_running", tags): 0,
        ("raymm_steps_total", tags): STEPS,  # from both starts, which share one driver here
        ("raymm_tokens_total", tags): sum(row["tokens"] for row in steps),
        ("raymm_tokens_per_second", tags): last["tokens_per_s"],
        ("raymm_heldout_loss", tags): evaluation["heldout_loss"],
        ("raymm_grad_norm", tags): last["grad_norm"],
        ("raymm_learning_rate", tags): last["learning_rate"],
        ("raymm_step_seconds", tags): last["seconds"],
        ("raymm_data_wait_seconds", tags): last["data_wait_s"],
        ("raymm_checkpoint_step", tags): STEPS,
        ("raymm_checkpoint_seconds", tags): told("checkpoint")[-1].seconds,
    }
    for module, rate in last["tflops"].items():
        wanted["raymm_tflops", (*tags, ("module", module))] = rate
    for process, peak in enumerate(last["peak_memory_bytes"]):
        wanted["raymm_peak_memory_bytes", (*tags, ("process", process))] = peak
    for stage, busy in last["stage_busy"].items():
        of_stage = (*tags, ("stage", stage), ("module", first.modules[stage]))
        wanted["raymm_stage_busy_ratio", of_stage] = busy
        wanted["raymm_stage_bubble_ratio", of_stage] = 1 - busy
    assert set(METRICS) - {name for name, _ in wanted} == {
        "raymm_samples_skipped_total", "raymm_steps_not_applied_total",  # there were none
        "raymm_mfu",  # there is no GPU
        "raymm_restarts_total", "raymm_expert_imbalance_ratio",  # nor a mixture of experts
    }
    scrape(wanted)


def test_a_failure_is_reported_to_callbacks_and_loggers(make_config, raymm, calls, ray_cluster):
    """Check that the run's own failure is reported, even if a callback exits the program."""
    config = make_config({
        "run.callbacks": [{FAILING: {"at": 1, "error": "SystemExit"}}, RECORDER],
        "run.max_skipped_steps": 2, "optimizer.lr": 1e30,
    })
    code, text = raymm("train", config)
    assert code == EXIT_REPEATS and "callback Failing failed in on_step: SystemExit" in text
    ends = [value for kind, value in calls if kind == "end"]
    assert len(ends) == 1 and ends[0].status == "failed" and "NotFiniteError" in ends[0].text


@pytest.mark.parametrize("entry, words", [
    ("tensorbord", ["run.callbacks[0] is 'tensorbord'", "tensorboard, wandb, mlflow", "module:Cl"]),
    ("tests.support.watching_callbacks:Nobody", ["run.callbacks[0]", "Nobody"]),
    ("tests.support.watching_callbacks:CALLS",
     ["run.callbacks[0]", "not a subclass of raymm.Callback"]),
    (FAILING, ["run.callbacks[0]", "TypeError", "at"]),
    ({FAILING: {"at": 1}, RECORDER: {}}, ["run.callbacks[0] has 2 names"]),
    ({"tensorboard": {"directory": "x"}}, ["run.callbacks[0]", "directory"]),
])  # fmt: skip
def test_callbacks_that_do_not_exist_are_refused_by_name(entry, words):
    with pytest.raises(ConfigError) as refused:
        named_callbacks([entry])
    assert all(word in str(refused.value) for word in words), refused.value


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"callbacks\[0\].*wandb.*pip install 'raymm\[wandb\]'"):
        named_callbacks(["wandb"])


def test_scalars_of_rows():
    row = {
        "step": 3, "loss": 1.5, "balance": {"copies": {"llm": 0.5}, "on": True},
        "peak_memory_bytes": [1, 5, 2], "names": ["a"], "nothing": None, "empty": [],
    }
    assert scalars(row) == {"loss": 1.5, "balance/copies/llm": 0.5, "peak_memory_bytes/max": 5.0}
