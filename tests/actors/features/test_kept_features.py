"""Space of the feature cache, counted by the sizes of the files."""

import pytest
import torch

from raymm.actors.features.feature_folder import FeatureFolder
from raymm.actors.features.kept_features import FeatureWriter


@pytest.mark.parametrize(("rows", "width"), [(4, 16), (64, 256)])
@pytest.mark.parametrize("room", [1_000, 300_000])
def test_features_stay_within_their_space(tmp_path, rows, width, room) -> None:
    """Check also space for less than one item, and a resumption with a full folder."""
    folder = FeatureFolder(tmp_path / "features", room)
    features = {f"{i:032x}": torch.randn(1, rows, width) for i in range(12)}
    for _ in range(2):
        writer = FeatureWriter(folder)
        for key, tensor in features.items():
            writer.keep([key], {"x": tensor})
        writer.wait()
    files = [file.stat().st_size for file in folder.path.rglob("*.features")]
    assert sum(files) <= room
    first = next(iter(features))
    size = FeatureFolder(tmp_path / "one", 0).write(first, {"x": features[first][0]})
    assert len(files) == min(len(features), room // size)
    for key, tensor in features.items():
        if (kept := folder.read(key)) is not None:
            assert torch.equal(kept["x"], tensor[0])
