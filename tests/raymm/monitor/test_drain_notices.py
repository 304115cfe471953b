"""A run leaves a draining node.

Ray has no public call for notices: the first test fails when Ray changes the private one.
"""

import threading

import pytest
import ray
from ray._private.state import GlobalState, state

from raymm.actors.placement import node_types
from raymm.cli.main import EXIT_START_AGAIN, main
from raymm.monitor import drain_notices
from raymm.monitor.drain_notices import DrainObserver, draining_nodes, notice
from raymm.monitor.metrics import MetricsLog
from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.tiny_run import STEPS, curve


def test_ray_still_reports_draining_nodes(ray_cluster):
    """Check that a healthy cluster has no notices; ``python -m tests.cluster`` covers real ones."""
    assert isinstance(state, GlobalState)
    assert state.get_draining_nodes() == {}
    assert draining_nodes() == {}


def test_the_message_of_a_drain_notice():
    assert notice({"ab" * 28: 29.6}) == "the notice that node abababababab ends in 30 s"
    assert notice({"ab" * 28: None}) == "the notice that node abababababab ends"


def test_notices_of_other_nodes_are_ignored(monkeypatch):
    monkeypatch.setattr(drain_notices, "INTERVAL_S", 0.01)
    notices: dict[str, float | None] = {"theirs": 5.0}
    monkeypatch.setattr(drain_notices, "draining_nodes", lambda: notices)
    told, heard = [], threading.Event()
    with DrainObserver({"mine"}, lambda text: (told.append(text), heard.set())):
        assert not heard.wait(0.2)
        notices["mine"] = None
        assert heard.wait(30)
    assert told == ["the notice that node mine ends"]


def test_two_drain_notices_lose_no_step(finished, make_config, raymm, tmp_path, monkeypatch):
    """Check that a notice only affects the processes of its attempt."""
    notices: dict[str, float | None] = {}
    heard, due = threading.Event(), [3, 8]

    def asked_by_the_observer() -> dict[str, float | None]:
        if notices:
            heard.set()
        return dict(notices)

    add = MetricsLog.add

    def announced(log, row):
        add(log, row)
        if due and "loss" in row and row["step"] == due[0]:
            del due[0]
            heard.clear()
            notices[ray.get_runtime_context().get_node_id()] = None
            assert heard.wait(60)
            notices.clear()

    monkeypatch.setattr(drain_notices, "INTERVAL_S", 0.05)
    monkeypatch.setattr(drain_notices, "draining_nodes", asked_by_the_observer)
    monkeypatch.setattr(MetricsLog, "add", announced)
    code, text = raymm("train", make_config({"run.checkpoint_every": 100}))
    assert code == 0, text
    assert "preemption 2 (run.max_preemptions); restarting" in text
    assert curve(tmp_path / "run") == curve(finished.path)
    taken = [line.split("/")[0].split()[-1] for line in text.splitlines()
             if line.startswith("step ")]
    assert taken == [str(step) for step in range(1, STEPS + 1)]


@pytest.mark.usefixtures("ray_cluster")
def test_a_drained_run_saves_and_exits_for_a_restart(make_config, tmp_path, monkeypatch, capsys):
    """Check that finished steps are saved; without another node, the exit code requests a restart.
    """
    from ray import get_runtime_context

    notices: dict[str, float | None] = {}

    def asked_by_the_observer() -> dict[str, float | None]:
        notices[get_runtime_context().get_node_id()] = 60.0
        return notices

    monkeypatch.setattr(drain_notices, "draining_nodes", asked_by_the_observer)
    monkeypatch.setattr(node_types, "draining_nodes", lambda: notices)
    config = make_config({"run.steps": 10_000, "run.checkpoint_every": 10_000})
    assert main(["train", config]) == EXIT_START_AGAIN
    output = " ".join(capsys.readouterr().out.split())
    latest = CheckpointStore(tmp_path / "run").latest()
    if latest is not None:  # a notice may arrive before the first step
        step = read_manifest(latest).step
        assert f"after step {step} of 10000: saved in {latest}" in output
    assert "stopped by the notice that node" in output
    assert "the run could not resume: the plan has 2 ranks of 0.25 CPU each" in output
    assert "the cluster has 0 CPU" in output and "Run the same command again to resume" in output
