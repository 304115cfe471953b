"""A rank that becomes slow is reported, and a spare replaces it without changing losses."""

import re

import pytest

from raymm import Callback
from raymm.cli.main import EXIT_USER_ERROR
from raymm.monitor import stragglers
from raymm.monitor.metrics import read_metrics
from tests.support.tiny_run import STEPS, curve

SLOW_AFTER = 4


def test_a_spare_replaces_a_slow_rank(
    finished, make_config, raymm, tmp_path, monkeypatch
):
    for name in ("STEPS", "BASELINE_STEPS"):
        monkeypatch.setattr(stragglers, name, 2)
    monkeypatch.setattr(stragglers, "TIMES", 5.0)  # the machine may be busy
    run, file = tmp_path / "slow", tmp_path / "slow.pid"
    code, text = raymm("train", make_config({
        "run.storage_path": str(run), "run.snapshot_every": 1, "run.spares": 1,
        "run.replace_stragglers": True, "run.steps_in_flight": 1,
        "model.mask": "tests.support.slowed_rank:causal",
        "resources.env": {"RAYMM_SLOWED_FILE": str(file)},
        "run.callbacks": [{f"{__name__}:SlowRank": {"file": str(file)}}],
    }))
    assert code == 0, text
    slow = re.search(r"straggler: rank (\d) takes", text)
    assert slow is not None and f"rank {slow[1]} (stages " in text, text
    assert text.count("recovering in place") == 1, text
    assert curve(run) == curve(finished.path)
    rows = read_metrics(run / "metrics.jsonl")
    (row,) = [row for row in rows if "recovered_after" in row]
    # The row of the step in which it was detected may be gone if that step is repeated.
    cause = row["recovered_after"]
    assert f"rank {slow[1]} (stages " in cause and "is a straggler" in cause
    assert row["step"] < STEPS


@pytest.mark.ray
@pytest.mark.timeout(180)
def test_processes_of_a_slow_rank_are_replaced_in_turn(
    make_config, raymm, tmp_path, monkeypatch
):
    """Replace processes until the rank is fast again: the second process is the slow one."""
    for name in ("STEPS", "BASELINE_STEPS"):
        monkeypatch.setattr(stragglers, name, 2)
    monkeypatch.setattr(stragglers, "TIMES", 5.0)
    layout = {
        "parallel.language_model": {"cp": 2, "ranks": [1]}, "resources.cpus": 0.2,
        "run.steps": 2 * STEPS,  # so that the second spare is ready before the end
    }
    whole, run, file = tmp_path / "whole", tmp_path / "slow", tmp_path / "slow.pid"
    code, text = raymm("train", make_config({**layout, "run.storage_path": str(whole)}))
    assert code == 0, text
    code, text = raymm("train", make_config({
        **layout, "run.storage_path": str(run), "run.snapshot_every": 1, "run.spares": 1,
        "run.replace_stragglers": True, "run.steps_in_flight": 1,
        "model.mask": "tests.support.slowed_rank:causal",
        "resources.env": {"RAYMM_SLOWED_FILE": str(file)},
        "run.callbacks": [{f"{__name__}:SlowRank": {"file": str(file), "number": 2}}],
    }))
    assert code == 0, text
    assert text.count("recovering in place") == 2, text
    assert text.index("1 of 2 processes in turn") < text.index("2 of 2 processes in turn")
    assert curve(run) == curve(whole)


def test_replacement_needs_a_spare_and_snapshots(make_config, raymm):
    code, text = raymm("train", make_config({"run.replace_stragglers": True}))
    assert code == EXIT_USER_ERROR and "spares is 0 and snapshot_every is None" in text


class SlowRank(Callback):
    """Callback that makes a rank slow.

    Args:
        file: file that ranks read.
        number: index of its process.
    """

    def __init__(self, file: str, number: int = 1) -> None:
        self.file, self.number = file, number
        self.begun = False

    def on_step(self, row):
        import ray._private.state

        if row["step"] == SLOW_AFTER and not self.begun:
            self.begun = True
            ranks = sorted(
                (actor["StartTime"], actor["Pid"])
                for actor in ray._private.state.actors().values()
                if actor["State"] == "ALIVE" and actor["ActorClassName"] == "RankActor"
            )
            with open(self.file, "w") as file:
                file.write(str(ranks[self.number][1]))  # the spare is after the ranks
