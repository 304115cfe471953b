"""Malicious files in a model's folder or in a checkpoint never run.

The attack is a pickle that would create a folder, with matching names, sizes and checksums.
"""

import os
import pickle

import pytest
import torch

from raymm.actors.optimizer.checkpoint_shards import checksum
from raymm.cli.main import EXIT_RUN_FAILED, EXIT_USER_ERROR
from raymm.errors import CheckpointError
from raymm.storage.manifest import FileEntry, read_manifest, write_manifest


class Bomb:
    """Object that creates a folder when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    """Return a folder that exists after an unpickling, as shown for a pickle that is loaded."""
    shown = tmp_path / "shown"
    pickle.loads(pickle.dumps(Bomb(shown)))
    assert shown.is_dir()
    return tmp_path / "unpickled"


def test_pickled_weights_are_not_read(make_config, raymm, inputs, tmp_path, marker):
    folder = tmp_path / "siglip"
    folder.mkdir()
    (folder / "config.json").write_bytes((inputs / "siglip" / "config.json").read_bytes())
    torch.save({"planted": Bomb(marker)}, folder / "pytorch_model.bin")
    code, text = raymm("train", make_config({"model.encoders.vision.path": str(folder)}))
    assert code == EXIT_USER_ERROR and "safetensors" in text, text
    assert not marker.exists()


def test_a_pickled_shard_with_a_valid_checksum_is_rejected(
    finished, make_config, raymm, tmp_path, marker
):
    run = finished.copy_until(tmp_path / "run", 10)
    checkpoint = run / "checkpoints" / "step-00000010"
    manifest = read_manifest(checkpoint)
    name = sorted(manifest.files)[0]
    (checkpoint / name).write_bytes(pickle.dumps(Bomb(marker)))
    entry = checksum(checkpoint / name)
    files = {**manifest.files, name: FileEntry(size=entry.size, xxh3_128=entry.checksum)}
    write_manifest(checkpoint, manifest.model_copy(update={"files": files}))
    code, text = raymm("train", make_config({"run.steps": 12}))
    assert code in (EXIT_USER_ERROR, EXIT_RUN_FAILED) and name in text, text
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", ".hidden.safetensors"])
def test_a_manifest_may_only_name_files_in_its_folder(finished, tmp_path, name):
    run = finished.copy_until(tmp_path / "run", 10)
    checkpoint = run / "checkpoints" / "step-00000010"
    manifest = read_manifest(checkpoint)
    entry = next(iter(manifest.files.values()))
    forged = manifest.model_copy(update={"files": {**manifest.files, name: entry}})
    write_manifest(checkpoint, forged)  # with a matching checksum
    with pytest.raises(CheckpointError, match="accepted: NAME.safetensors, without folder"):
        read_manifest(checkpoint)
