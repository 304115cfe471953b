"""Values and state of run hooks, also after failures."""

import pytest

from raymm import RunHook
from raymm.callbacks.handler import CallbackHandler
from raymm.monitor.metrics import read_metrics
from tests.support.hook_classes import Mean
from tests.support.tiny_run import STEPS


def take(handler, steps):
    rows = []
    for step in steps:
        handler.before_step(step)
        rows.append({"step": step, "loss": 1 / step})
        handler.after_step(rows[-1])
    return rows


def handler(tmp_path, *hooks, said=None):
    made = CallbackHandler(hooks, tmp_path, ([] if said is None else said).append)
    made.load_hooks(0, 9, None)
    return made


def test_replayed_steps_get_the_same_values(tmp_path):
    whole = take(handler(tmp_path, Mean()), range(1, 8))
    interrupted = handler(tmp_path, Mean())
    take(interrupted, range(1, 4))
    interrupted.forget(2)
    take(interrupted, range(4, 6))
    interrupted.rewind(2)
    assert take(interrupted, range(3, 8)) == whole[2:]


def test_a_restart_without_a_checkpoint_begins_with_the_first_state(tmp_path):
    restarted = handler(tmp_path, Mean())
    first = take(restarted, range(1, 4))
    restarted.load_hooks(0, 9, None)
    assert take(restarted, range(1, 4)) == first


def test_hooks_of_one_class_have_separate_states(tmp_path):
    first = handler(tmp_path, Mean("a"), Mean("b"))
    take(first, [1])
    assert set(first.at_checkpoint(1)) == {"Mean", "Mean#2"}


def test_a_later_hook_reads_values_of_an_earlier_hook(tmp_path):
    class Double(RunHook):
        def after_step(self, context, row):
            return {"double": 2 * row["mean_loss"]}

    (row,) = take(handler(tmp_path, Mean(), Double()), [1])
    assert (row["mean_loss"], row["double"]) == (1.0, 2.0)


@pytest.mark.parametrize("values, words", [
    ({"loss": 1.0}, "'loss' is not new in the row"), ({"x": "1"}, "x is '1'; accepted: a number"),
])  # fmt: skip
def test_a_hook_with_invalid_values_is_removed(tmp_path, values, words):
    class Wrong(RunHook):
        def after_step(self, context, row):
            return values

    said = []
    rows = take(handler(tmp_path, Wrong(), Mean(), said=said), [1, 2])
    assert len(said) == 1 and "callback Wrong failed in after_step" in said[0] and words in said[0]
    assert [set(row) for row in rows] == [{"step", "loss", "mean_loss"}] * 2


def test_a_hook_whose_state_is_not_json_is_removed(tmp_path):
    class Wrong(RunHook):
        def state_dict(self):
            return {"value": float("nan")}

    said = []
    handler(tmp_path, Wrong(), said=said)
    assert len(said) == 1 and "callback Wrong failed in state_dict" in said[0]


def test_a_state_without_its_hook_is_reported(tmp_path):
    said = []
    handler(tmp_path, said=said).load_hooks(1, 9, {"Mean": {"total": 1.0, "steps": 1}})
    assert said == ["note: the saved state of hook Mean is dropped: the run has no such hook"]


def test_state_survives_a_stop_and_a_killed_rank(make_config, raymm, tmp_path, ray_cluster):
    run = tmp_path / "hooked"
    changes = {
        "run.storage_path": str(run), "run.max_failures": 0, "run.snapshot_every": 2,
        "optimizer.total_steps": STEPS,
        "run.callbacks": ["tests.support.hook_classes:Mean",
            {"tests.support.killing_callbacks:KillRanks": {"after": [9]}}],
    }
    assert raymm("train", make_config({**changes, "run.steps": 5}))[0] == 0
    code, text = raymm("train", make_config({**changes, "run.steps": STEPS}))
    assert code == 0 and text.count("recovering in place") == 1, text
    rows = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == [*range(1, STEPS + 1)]
    total = 0.0
    for row in rows:
        total += row["loss"]
        assert row["mean_loss"] == total / row["step"]
