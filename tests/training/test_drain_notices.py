"""A notice that a node ends stops a run in order. Ray has no public call for notices: the first
test fails when Ray changes the one that is used."""

import threading

import pytest
from ray._private.state import GlobalState, state

from raymm.cli.main import EXIT_START_AGAIN, main
from raymm.runtime import drain_notices
from raymm.runtime.drain_notices import DrainObserver, draining_nodes, notice
from raymm.storage.checkpoint import CheckpointStore, read_manifest


def test_ray_still_says_which_nodes_end(ray_cluster):
    """Of a whole cluster none does. That one is seen, ``python -m tests.cluster`` shows."""
    assert isinstance(state, GlobalState)
    assert state.get_draining_nodes() == {}
    assert draining_nodes() == {}


def test_a_notice_in_words():
    assert notice({"ab" * 28: 29.6}) == "the notice that node abababababab ends in 30 s"
    assert notice({"ab" * 28: None}) == "the notice that node abababababab ends"


def test_other_nodes_do_not_count(monkeypatch):
    monkeypatch.setattr(drain_notices, "INTERVAL_S", 0.01)
    notices: dict[str, float | None] = {"theirs": 5.0}
    monkeypatch.setattr(drain_notices, "draining_nodes", lambda: notices)
    told, heard = [], threading.Event()
    with DrainObserver({"mine"}, lambda text: (told.append(text), heard.set())):
        assert not heard.wait(0.2)
        notices["mine"] = None
        assert heard.wait(30)
    assert told == ["the notice that node mine ends"]


@pytest.mark.usefixtures("ray_cluster")
def test_a_run_leaves_in_order(make_config, tmp_path, monkeypatch, capsys):
    """Steps taken are saved, and the exit code says that it is to be started again."""
    from ray import get_runtime_context

    monkeypatch.setattr(
        drain_notices, "draining_nodes", lambda: {get_runtime_context().get_node_id(): 60.0}
    )
    config = make_config({"run.steps": 10_000, "run.checkpoint_every": 10_000})
    assert main(["train", config]) == EXIT_START_AGAIN
    output = " ".join(capsys.readouterr().out.split())
    latest = CheckpointStore(tmp_path / "run").latest()
    if latest is not None:  # a notice may come before the first step
        step = read_manifest(latest).step
        assert f"after step {step} of 10000: all of it is in {latest}" in output
    assert "stopped by the notice that node" in output
