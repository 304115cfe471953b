"""Schedule and content of checkpoints."""

import pytest

from raymm.storage.checkpoint import CheckpointStore
from raymm.storage.manifest import read_manifest
from tests.support.watching_callbacks import CALLS


@pytest.fixture
def calls():
    CALLS.clear()
    yield CALLS
    CALLS.clear()


def test_the_last_step_is_saved_without_frozen_weights(raymm, make_config, tmp_path, ray_cluster):
    code, text = raymm("train", make_config({
        "run.steps": 3, "run.checkpoint_every": 100, "model.encoders.vision.train": "frozen",
    }))
    assert code == 0, text
    (folder,) = CheckpointStore(tmp_path / "run").committed()
    assert folder.name == "step-00000003"
    names = [name for name in read_manifest(folder).index if name.startswith("vision/")]
    assert names and all("projector" in name for name in names)


def test_steps_wait_for_synchronous_checkpoints(
    raymm, make_config, tmp_path, ray_cluster, calls
):
    code, text = raymm("train", make_config({
        "run.steps": 4, "run.checkpoint_every": 1, "run.asynchronous_checkpoints": False,
        "run.callbacks": ["tests.support.watching_callbacks:Recorder"],
    }))
    assert code == 0, text
    order = [
        (kind, value["step"] if kind == "step" else value.step)
        for kind, value in calls if kind in ("step", "checkpoint")
    ]
    assert order == [(kind, step) for step in range(1, 5) for kind in ("step", "checkpoint")]
