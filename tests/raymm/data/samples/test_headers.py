"""Items above the limits are rejected by their headers, without using memory."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
from PIL import Image

from raymm.data import StepBuilder, open_split
from raymm.data.readers import ParquetDataset, ReaderOptions, TarDataset
from raymm.data.samples.headers import Limits, check_media, kind_of
from raymm.data.samples.media import MediaBytes, MediaRange
from raymm.errors import DataError, SampleError
from tests.support import bombs
from tests.support.sample_files import write_image, write_sound

# A decoded bomb of any kind would need several times as much.
MAX_GROWTH_MIB = 100


@pytest.mark.parametrize("kind", ["png", "gif", "webp", "tif", "bmp", "jpg"])
def test_images_are_refused_by_their_headers(tmp_path, kind):
    path = tmp_path / f"bomb.{kind}"
    bombs.IMAGES[kind](path)
    assert path.stat().st_size < 2_000_000
    for media in (str(path), MediaBytes("x", path.read_bytes())):
        with pytest.raises(SampleError, match=r"above data.max_image_pixels \(89,478,485\)"):
            check_media(media, Limits())


FORMATS = ["PNG", "GIF", "WEBP", "TIFF", "BMP", "JPEG", "JPEG2000", "PPM"]


@pytest.mark.parametrize("name", FORMATS)
def test_real_images_have_their_size(tmp_path, name):
    path = tmp_path / "image"
    for size in ((301, 7), (1, 40)):
        pixels = np.zeros((size[1], size[0], 3), np.uint8)
        Image.fromarray(pixels).save(path, format=name)
        header = check_media(str(path), Limits())
        assert (header.kind, header.width, header.height) == ("image", *size)
        assert kind_of(path) == "image"
        exact = Limits(max_image_pixels=size[0] * size[1])
        assert check_media(str(path), exact) == header
        with pytest.raises(SampleError, match="max_image_pixels"):
            check_media(str(path), Limits(max_image_pixels=size[0] * size[1] - 1))


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"exif": b"Exif"}])
def test_all_kinds_of_webp_have_their_size(tmp_path, options):
    Image.new("RGB", (333, 21), "red").save(tmp_path / "i.webp", **options)
    header = check_media(str(tmp_path / "i.webp"), Limits())
    assert (header.width, header.height) == (333, 21)


def test_limits_above_pillows_own_count(make_config, tmp_path, monkeypatch):
    config = make_config(max_image_pixels=20_000)
    Image.new("RGB", (100, 100)).save(tmp_path / "i1.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)  # Pillow raises an error at 2000 pixels
    built = StepBuilder(config, open_split(config, "train")).build([1])
    assert built.microbatches[0]["vision"]["pixel_values"].shape == (1, 3, 8, 8)
    assert Image.MAX_IMAGE_PIXELS == 1000


@pytest.mark.parametrize("suffix", ["wav", "flac", "ogg", "aiff", "mp3", "au", "caf"])
def test_sounds_have_their_length(tmp_path, suffix):
    path = tmp_path / f"a.{suffix}"
    soundfile.write(path, np.random.default_rng(0).uniform(-0.1, 0.1, (4800, 2)), 48_000)
    header = check_media(str(path), Limits())
    assert (header.kind, header.rate, header.channels) == ("audio", 48_000, 2)
    assert 4800 <= header.frames < 9600  # MP3 comes in frames of 1152
    assert kind_of(path) == "audio"
    with pytest.raises(SampleError, match=r"max_audio_samples \(9,599\)"):
        check_media(str(path), Limits(max_audio_samples=9599))


def test_absurd_sounds_are_refused(tmp_path):
    bombs.flac(tmp_path / "a.flac")
    with pytest.raises(SampleError, match="68,719,476,735 frames.*max_audio_samples"):
        check_media(str(tmp_path / "a.flac"), Limits())
    wave = np.zeros(100, np.float32)
    # 100 s at 1 Hz are as long as any other 100 s after resampling.
    soundfile.write(tmp_path / "slow.wav", wave, 1)
    with pytest.raises(SampleError, match=r"4,800,000 samples"):
        check_media(str(tmp_path / "slow.wav"), Limits(max_audio_samples=4_000_000))
    soundfile.write(tmp_path / "fast.wav", wave, 2_000_000_000)
    with pytest.raises(SampleError, match="sample rate is 2,000,000,000 Hz"):
        check_media(str(tmp_path / "fast.wav"), Limits())


def test_sounds_of_no_length_and_empty_files(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(0, np.float32), 16_000)
    with pytest.raises(SampleError, match="holds no sound"):
        check_media(str(tmp_path / "a.wav"), Limits())
    (tmp_path / "e.png").touch()
    with pytest.raises(SampleError, match="the file is empty"):
        check_media(str(tmp_path / "e.png"), Limits())


def test_large_files_are_refused_unread(tmp_path):
    bombs.sparse(tmp_path / "large.bin")
    with pytest.raises(SampleError, match=r"1,099,511,627,776 bytes, above data.max_item_bytes"):
        check_media(str(tmp_path / "large.bin"), Limits())
    with pytest.raises(SampleError, match="max_item_bytes"):
        check_media(MediaRange("x", str(tmp_path / "large.bin"), 0, 2**34), Limits())
    assert check_media(str(tmp_path / "large.bin"), Limits(max_item_bytes=2**41)).kind == "other"


def values(tmp_path, *sizes, **options):
    table = pa.table({"text": ["a"] * len(sizes), "image": [b"\0" * size for size in sizes]})
    pq.write_table(table, tmp_path / "v.parquet", **options)
    return tmp_path / "v.parquet"


def test_parquet_values_are_measured_before_they_are_copied(tmp_path):
    path = values(tmp_path, 10, 2000, 10)
    options = ReaderOptions(columns={"vision": "image"}, limits=Limits(max_item_bytes=1000))
    dataset = ParquetDataset(path, None, options)
    assert len(dataset[2].media["vision"][0].data) == 10
    message = r"v.parquet\[1\]', column 'image': it has 2,000 bytes, above data.max_item_bytes"
    with pytest.raises(SampleError, match=message):
        dataset[1]


def test_row_groups_are_measured_before_they_are_read(tmp_path):
    path = values(tmp_path, *[1000] * 10, use_dictionary=False, row_group_size=5)
    options = ReaderOptions(columns={"vision": "image"}, limits=Limits(max_row_group_bytes=4000))
    with pytest.raises(DataError, match=r"row group 0 has .* 'image' .*data.max_row_group_bytes"):
        ParquetDataset(path, None, options)
    # One dictionary entry for all rows: small by its metadata, large when decoded.
    path = values(tmp_path, *[1000] * 40, row_group_size=40)
    dataset = ParquetDataset(path, None, options)
    with pytest.raises(SampleError, match="more than 4,000 bytes when decoded"):
        dataset[0]


def test_a_shards_large_member_is_refused_unread(tmp_path, make_config):
    bombs.shard(tmp_path / "s.tar")
    dataset = TarDataset(tmp_path / "s.tar", {"vision": "png"})
    assert dataset.counts["vision"].tolist() == [0, 1]
    config = make_config(train={"path": str(tmp_path / "s.tar"), "columns": {"audio": None}})
    config.modalities["vision"].column = "png"
    with pytest.raises(SampleError) as caught:
        StepBuilder(config, dataset).build([1])
    assert caught.value.column == "png" and caught.value.path.endswith("s.tar[large.png]")
    assert "8,589,934,592 bytes, above data.max_item_bytes" in caught.value.reason


_RUN = """
import json, sys
from pathlib import Path
from raymm.data import DataConfig, StepBuilder, open_split, scan
config = DataConfig.model_validate_json(Path(sys.argv[1]).read_text())
# Not getrusage, whose maximum is also that of the process this one was forked from.
status = lambda: Path("/proc/self/status").read_text().splitlines()
peak = lambda: int(next(x for x in status() if x.startswith("VmHWM")).split()[1]) / 1024
dataset = open_split(config, "train")
builder = StepBuilder(config, dataset)
builder.build([0, 1, len(dataset) - 1])
before = peak()
dataset = open_split(config, "train")
found = scan(dataset, config, workers=1)
skipped = builder.build(range(len(dataset))).skipped
grown = peak() - before
config.max_image_pixels = 300_000_000
builder.build([2])
print(json.dumps([grown, peak() - before, [[s.id, s.column, s.reason] for s in skipped],
                  found.unusable.tolist()]))
"""


def write_dictionary_bomb(folder: Path, rows: int = 500) -> None:
    """Write ``b.parquet`` of 2 MB, 500 MB when decoded, and ``c.parquet`` with a good row.

    The former has one dictionary entry for all rows.
    """
    entry = pa.DictionaryArray.from_arrays(
        pa.array(np.zeros(rows, np.int32)), pa.array([b"\0" * 2**20])
    )
    table = pa.table({"text": ["a cat"] * rows, "images": entry})
    pq.write_table(table, folder / "b.parquet", store_schema=False, row_group_size=rows,
                   dictionary_pagesize_limit=2**24)
    good = pa.table({"text": ["a cat"], "images": [(folder / "i.png").read_bytes()]})
    pq.write_table(good, folder / "c.parquet")


def test_bombs_do_not_fill_the_memory(make_config, tmp_path):
    names = [f"bomb.{kind}" for kind in bombs.IMAGES]
    for name, write in zip(names, bombs.IMAGES.values(), strict=True):
        write(tmp_path / name)
    bombs.sparse(tmp_path / "sparse.png")
    bombs.flac(tmp_path / "bomb.flac")
    rows = [
        {"id": "sound", "text": "a cat", "audio": "i.wav"},
        {"id": "image", "text": "a cat", "images": "i.png"},
        *({"id": name, "text": "a cat", "images": name} for name in [*names, "sparse.png"]),
        {"id": "bomb.flac", "text": "a cat", "audio": "bomb.flac"},
    ]
    tables = [{"path": str(tmp_path / f"{n}.parquet"), "columns": {"audio": None}} for n in "bc"]
    config = make_config(
        train=[str(tmp_path / "train.jsonl"), *tables], on_error="skip", max_row_group_bytes=2**24
    )
    write_image(tmp_path / "i.png", 0)
    write_sound(tmp_path / "i.wav", 0)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_dictionary_bomb(tmp_path)
    assert (tmp_path / "b.parquet").stat().st_size < 2**22
    (tmp_path / "config.json").write_text(config.model_dump_json())
    done = subprocess.run(
        [sys.executable, "-c", _RUN, str(tmp_path / "config.json")], capture_output=True,
        text=True, cwd=Path(__file__).parents[1], timeout=240,
    )
    assert done.returncode == 0, done.stderr
    grown, decoded, skipped, unusable = json.loads(done.stdout.splitlines()[-1])
    reasons = {name: (column, reason) for name, column, reason in skipped}
    assert all("data.max_image_pixels" in reasons[name][1] for name in names)
    assert {reasons[name][0] for name in names} == {"images"}
    assert "data.max_item_bytes" in reasons["sparse.png"][1]
    assert reasons["bomb.flac"][0] == "audio" and "max_audio_samples" in reasons["bomb.flac"][1]
    of_table = [reason for name, _, reason in skipped if "b.parquet" in name]
    assert len(of_table) == 500
    assert all("16,777,216 bytes when decoded" in reason for reason in of_table)
    assert unusable == list(range(2, 500 + len(rows))) and len(skipped) == len(unusable)
    assert grown < MAX_GROWTH_MIB
    assert decoded > MAX_GROWTH_MIB  # a decoded picture would be detected
