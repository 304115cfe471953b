"""Features in a folder are restored bit for bit, or not at all."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raymm.actors.features.feature_folder import FeatureFolder, make_room
from raymm.actors.features.kept_features import FeatureWriter
from raymm.errors import InputError

KEY = "ab12"
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@given(
    st.sampled_from(DTYPES), st.lists(st.integers(1, 4), max_size=3), st.integers(0, 9),
    st.integers(0, 10_000), st.integers(1, 255),
)
def test_damaged_features_are_missing(tmp_path_factory, dtype, shape, seed, place, change) -> None:
    folder = FeatureFolder(tmp_path_factory.mktemp("features"), 2**20)
    torch.manual_seed(seed)
    features = {
        "hidden": (torch.randn(shape) * 100).to(dtype), "mask": torch.ones(3, dtype=torch.int64),
        "empty": torch.zeros(0),
    }
    assert folder.write(KEY, features) == folder.bytes()
    read = folder.read(KEY)
    assert read is not None and list(read) == list(features)
    for name, tensor in features.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)

    file = folder.file(KEY)
    data = bytearray(file.read_bytes())
    data[place % len(data)] ^= change
    file.write_bytes(bytes(data))
    assert folder.read(KEY) is None and not folder.has(KEY)
    folder.write(KEY, features)
    file.write_bytes(file.read_bytes()[: place % len(data)])
    assert folder.read(KEY) is None
    folder.write("abff", features)
    folder.file("abff").rename(folder.file(KEY))
    assert folder.read(KEY) is None  # another item's


def test_cache_space_is_bounded(tmp_path) -> None:
    item = torch.zeros(100)
    size = FeatureFolder(tmp_path, 0).size("a0", {"hidden": item})
    writer = FeatureWriter(FeatureFolder(tmp_path, 3 * size + 10))
    writer.keep(["a0", "", "a1", "a2", "a3", "a4"], {"hidden": torch.zeros(6, 100)})
    writer.wait()
    folder = FeatureFolder(tmp_path, 0)
    assert [folder.has(f"a{n}") for n in range(5)] == [True, True, True, False, False]
    # Existing features count the next time.
    writer = FeatureWriter(FeatureFolder(tmp_path, 4 * size - 1))
    writer.keep(["b0"], {"hidden": torch.zeros(1, 100)})
    writer.wait()
    assert not folder.has("b0")


def test_features_without_item_rows_are_not_cached(tmp_path) -> None:
    """Check that such features, which could be those of another item, are not stored."""
    writer = FeatureWriter(FeatureFolder(tmp_path, 2**20))
    for rows in (1, 3):
        with pytest.raises(InputError, match=f"{rows} rows of .* for 2 items; accepted: one row"):
            writer.keep(["a0", "a1"], {"hidden": torch.zeros(rows, 4)})
    writer.wait()
    assert not list(tmp_path.iterdir())


def test_other_encoders_make_room(tmp_path) -> None:
    folders = [FeatureFolder(tmp_path / name, 0) for name in ("vision-1", "vision-2", "audio-3")]
    size = [folder.write(KEY, {"hidden": torch.zeros(100)}) for folder in folders][0]
    assert make_room(tmp_path, [folders[1].path], 3 * size) == []
    removed = make_room(tmp_path, [folders[1].path], size)
    assert removed == [folders[0].path, folders[2].path]
    assert folders[1].has(KEY) and not folders[0].path.exists()
