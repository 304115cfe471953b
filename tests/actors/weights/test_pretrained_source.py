"""Models and data sets by hub id: one commit for all ranks, from each machine's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from raymm.actors.weights.pretrained_source import PretrainedSource
from raymm.monitor.metrics import read_metrics
from tests.support.hub_server import HubServer
from tests.support.tiny_folders import tiny
from tests.support.tiny_run import child_environment

MODEL, ROWS = "acme/tiny-vlm", "acme/rows"


@pytest.fixture
def hub():
    server = HubServer()
    yield server
    server.close()


@pytest.fixture
def commits(hub, tmp_path):
    """Return commits of a model, which also has weights in other formats, and of text rows."""
    weights = {"pytorch_model.bin": b"a pickle", "onnx/model.onnx": b"another format"}
    model = hub.commit(f"models/{MODEL}", Path(tiny("idefics3")[0]), **weights)
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"What is {n}?"},
                      {"role": "assistant", "content": f"It is {n}."}]} for n in range(12)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return model, hub.commit(f"datasets/{ROWS}", folder)


def environment(hub, home, **more):
    variables = {
        "HF_ENDPOINT": hub.root, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0",
        "HF_DATASETS_OFFLINE": "0",
    }  # fmt: skip
    return {**child_environment(), **variables, **more}


def raymm(variables, folder, *arguments):
    return subprocess.run(
        [sys.executable, "-m", "raymm", *arguments], cwd=folder, env=variables, text=True,
        capture_output=True, timeout=240,
    )


@pytest.mark.ray
@pytest.mark.sweep  # its parts are tested below, and commands in test_first_command
@pytest.mark.timeout(900)  # three commands import everything and start Ray
def test_a_model_and_rows_train_by_their_ids(hub, commits, tmp_path):
    variables = environment(hub, tmp_path / "home")
    command = ["train", "--model", MODEL, "--data", ROWS, "--set", "planning.ranks=1"]
    done = raymm(variables, tmp_path, *command, "--set", "run.steps=1")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "tiny-vlm"
    values = yaml.safe_load((run / "run.yaml").read_text())
    assert (values["model"]["path"], values["model"]["revision"]) == (MODEL, commits[0])
    assert values["data"]["train"] == [{"path": f"hf://datasets/{ROWS}", "revision": commits[1]}]
    fetched = [request for request in hub.requests if request.startswith("GET")]
    assert any("model.safetensors" in request for request in fetched)
    assert not [request for request in fetched if "pytorch_model" in request or "onnx" in request]
    # The model changes on the hub, and the run neither changes nor needs the hub.
    hub.commit(f"models/{MODEL}", Path(tiny("gemma3")[0]))
    variables |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = raymm(variables, tmp_path, *command, "--set", "run.steps=2")
    assert done.returncode == 0, done.stderr
    losses = [row for row in read_metrics(run / "metrics.jsonl") if "loss" in row]
    assert len(losses) == 2
    done = raymm(variables, tmp_path, "train", "--model", "acme/other", "--data", ROWS)
    assert done.returncode == 2


OTHER_NODE = """
import pickle, sys
source = pickle.load(open(sys.argv[1], "rb"))
print(source.folder)
print(sum(parameter.numel() for parameter in source.build().parameters()))
"""


def test_another_node_reads_the_same_commit(hub, commits, tmp_path, monkeypatch):
    """Use a rank with an empty cache, after the main branch has moved."""
    variables = environment(hub, tmp_path / "here")
    first = subprocess.run(
        [sys.executable, "-c", "import pickle, sys\n"
         "from raymm.actors.weights.pretrained_source import PretrainedSource\n"
         f"pickle.dump(PretrainedSource({MODEL!r}), open('source', 'wb'))"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120,
    )
    assert first.returncode == 0, first.stderr
    hub.commit(f"models/{MODEL}", Path(tiny("gemma3")[0]))
    other = subprocess.run(
        [sys.executable, "-c", OTHER_NODE, "source"], cwd=tmp_path, text=True,
        env=environment(hub, tmp_path / "there"), capture_output=True, timeout=120,
    )
    assert other.returncode == 0, other.stderr
    folder, parameters = other.stdout.split()[-2:]
    assert Path(folder).name == commits[0] and folder.startswith(str(tmp_path / "there"))
    own = PretrainedSource(tiny("idefics3")[0]).build()
    assert int(parameters) == sum(parameter.numel() for parameter in own.parameters())


REFUSED = {
    "no such model": (["acme/nothing", "rows.jsonl"], ["a folder", "has no model 'acme/nothing'"]),
    "no such revision": ([f"{MODEL}@v9", "rows.jsonl"], ["not its revision 'v9'"]),
    "a gated model": (["acme/gated", "rows.jsonl"], ["gated", "hf auth login", "HF_TOKEN"]),
    "no such rows": ([MODEL, "acme/none"], ["not a file or folder", "has no data set 'acme/none'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rejections_by_the_hub_are_explained(hub, commits, tmp_path, name):
    hub.commit("models/acme/gated", Path(tiny("idefics3")[0]))
    hub.tokens["models/acme/gated"] = "secret"
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    (model, data), parts = REFUSED[name]
    variables = environment(hub, tmp_path / "home")
    done = raymm(variables, tmp_path, "train", "--model", model, "--data", data)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2 and not [part for part in parts if part not in text], text


def test_a_redirected_download_gets_no_token(hub, tmp_path):
    model, storage = Path(tiny("idefics3")[0]), HubServer()
    for server in (hub, storage):
        server.commit(f"models/{MODEL}", model)
    hub.tokens[f"models/{MODEL}"], hub.files_at = "secret", storage.root
    code = (
        "from raymm.actors.weights.hub_folder import local_folder; "
        f"print(local_folder({MODEL!r}))"
    )
    variables = environment(hub, tmp_path / "home", HF_TOKEN="secret")
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=variables, text=True, capture_output=True,
            timeout=240,
        )
    finally:
        storage.close()
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == (model / "model.safetensors").read_bytes()
    assert "Bearer secret" in hub.authorizations
    assert storage.requests and set(storage.authorizations) == {None}


def test_errors_without_a_network_name_cache_and_command(hub, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    home = tmp_path / "home"
    hub.close()  # the hub is down
    for more in ({}, {"HF_HUB_OFFLINE": "1"}):
        variables = environment(hub, home, **more)
        command = ["train", "--model", f"{MODEL}@v1", "--data", "rows.jsonl"]
        text = " ".join(raymm(variables, tmp_path, *command).stderr.split())
        for part in (
            str(tmp_path / MODEL), str(home / "hub"), f"`hf download {MODEL} --revision v1`",
        ):
            assert part in text
        command = ["train", "--model", tiny("idefics3")[0], "--data", ROWS]
        text = " ".join(raymm(variables, tmp_path, *command).stderr.split())
        assert f"hf download --repo-type dataset {ROWS}" in text and str(home / "hub") in text


def test_a_folder_wins_over_an_id(hub, commits, tmp_path):
    (tmp_path / MODEL).parent.mkdir()
    (tmp_path / MODEL).mkdir()
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    done = raymm(
        environment(hub, tmp_path / "home"), tmp_path, "train", "--model", MODEL, "--data",
        "rows.jsonl",
    )
    assert done.returncode == 2 and "has no config.json" in done.stderr
    assert hub.requests == []


def test_a_script_of_a_data_set_is_not_run(hub, tmp_path):
    ran, folder = tmp_path / "ran", tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(f"open({str(ran)!r}, 'w')")
    hub.commit(f"datasets/{ROWS}", folder)
    opening = f"from raymm.data import open_source; open_source('hf://datasets/{ROWS}')"
    done = subprocess.run(
        [sys.executable, "-c", opening], env=environment(hub, tmp_path / "home"), text=True,
        capture_output=True, timeout=240,
    )
    assert done.returncode and "DataError" in done.stderr and "scripts" in done.stderr, done.stderr
    assert any("rows.py" in request for request in hub.requests) and not ran.exists()
