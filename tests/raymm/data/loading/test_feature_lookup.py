"""Keys of cached features: the content of an item and nothing else."""

from raymm.data.loading.feature_lookup import FeatureLookup, item_key
from raymm.data.samples.media import MediaBytes


def test_a_key_depends_on_the_bytes_and_not_on_the_name(tmp_path):
    first, second, other = tmp_path / "a.png", tmp_path / "\u00fc b.jpg", tmp_path / "c.png"
    first.write_bytes(b"same")
    second.write_bytes(b"same")
    other.write_bytes(b"other")
    assert item_key(str(first)) == item_key(str(second)) == item_key(MediaBytes("x", b"same"))
    assert item_key(str(other)) != item_key(str(first))


def test_frames_have_other_keys_than_their_joined_bytes():
    frames = [MediaBytes("x", data) for data in (b"ab", b"c", b"a", b"bc")]
    keys = {item_key(tuple(part)) for part in (frames[:2], frames[2:], frames[1::-1])}
    assert len(keys) == 3 and item_key(MediaBytes("x", b"abc")) not in keys


def test_an_unreadable_item_has_no_key(tmp_path):
    assert item_key(str(tmp_path / "none.png")) == ""


def test_without_folders_a_step_has_no_features():
    found = FeatureLookup({}).of_step([])
    assert not found.keys and not found.features
