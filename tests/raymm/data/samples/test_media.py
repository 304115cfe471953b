"""Inputs of processors for items in files, bytes and shards."""

import json
import tarfile

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessor, LlavaProcessor, WhisperFeatureExtractor
from transformers.models.whisper import WhisperProcessor

from raymm.data import StepBuilder, open_split
from raymm.data.samples.media import MediaBytes, MediaRange, media_name, open_media, read_media
from raymm.data.samples.processors import load_processor, processor_input
from raymm.errors import DataError, SampleError
from tests.support.same_rows import add_member
from tests.support.sample_files import build_tokenizer, write_image, write_sound


@pytest.fixture
def forms(tmp_path):
    """Return the same picture as a file, as bytes, and inside a shard."""
    write_image(tmp_path / "i.png", 0)
    data = (tmp_path / "i.png").read_bytes()
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        add_member(shard, "x.png", data)
    where = MediaRange("x.png", str(tmp_path / "s.tar"), tarfile.BLOCKSIZE, len(data))
    return [str(tmp_path / "i.png"), MediaBytes("row.images[0]", data), where]


def test_items_are_read_the_same_from_any_source(forms):
    data = forms[1].data
    for media in forms:
        assert read_media(media) == data == processor_input(media, "bytes")
        assert processor_input(media, "image").size == (12, 9)
        with open_media(media) as file:
            assert file.seek(-8, 2) == len(data) - 8 and file.read() == data[-8:]
            assert file.seek(1) == 1 and file.read(7) == data[1:8] and file.tell() == 8
            assert file.seek(2, 1) == 10 and file.read(4) == data[10:14]
        given = processor_input(media, "file")
        assert given == media if isinstance(media, str) else given.getvalue() == data
    assert media_name(forms[2]).endswith("s.tar[x.png]")


def test_a_shard_that_became_shorter_is_noticed(forms, tmp_path):
    with open(tmp_path / "s.tar", "r+b") as shard:
        shard.truncate(tarfile.BLOCKSIZE + 20)
    with pytest.raises(OSError, match="ends .* bytes before the end of 'x.png'"):
        read_media(forms[2])


@pytest.mark.parametrize(
    ("kind", "function", "expected"),
    [("bytes", "from_bytes", None), ("image", "from_picture", [12, 9, 1])],
)
def test_functions_get_the_configured_inputs(make_config, kind, function, expected):
    vision = {"column": "images", "processor": f"tests.support.media_processors:{function}",
        "input": kind}
    config = make_config(modalities={"vision": vision}, ignore_columns=["audio"])
    dataset = open_split(config, "train")
    value = StepBuilder(config, dataset).build([1]).microbatches[0]["vision"]["pixel_values"][0]
    if expected is None:
        expected = [len(read_media(dataset[1].media["vision"][0]))]
    assert value.tolist() == expected


def test_items_of_frames(make_config, tmp_path):
    rows = [{"text": "a cat", "images": ["a.png", "b.png"]},
            {"text": "a cat", "images": [["a.png"], ["b.png"] * 5]}, {"text": "a cat"}]
    vision = {"column": "images", "processor": "tests.support.media_processors:from_frames",
        "frames": True}
    config = make_config(modalities={"vision": vision}, batch_size=3, microbatches=1)
    for seed, name in enumerate(("a.png", "b.png")):
        write_image(tmp_path / name, seed)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = open_split(config, "train")
    assert dataset.counts["vision"].tolist() == [1, 2, 0]
    (microbatch,) = StepBuilder(config, dataset).build([0, 1, 2]).microbatches
    videos = microbatch["vision"]["pixel_values_videos"]
    assert videos.shape == (3, 4, 3, 8, 8)
    assert microbatch["vision"]["sample_index"].tolist() == [0, 1, 1]
    assert torch.equal(videos[0, :2], torch.stack([videos[1, 0], videos[2, 0]]))
    (tmp_path / "b.png").write_bytes(b"broken")
    with pytest.raises(SampleError, match=r"column 'images', file .*a.png and 1 more frames"):
        StepBuilder(config, dataset).build([0])


def tokenizer_with_image():
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return tokenizer


def test_folders_of_full_processors(tmp_path):
    images = CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    sounds = WhisperFeatureExtractor(feature_size=80, chunk_length=1)
    images.save_pretrained(tmp_path / "images")
    LlavaProcessor(images, tokenizer_with_image(), patch_size=8).save_pretrained(tmp_path / "llava")
    WhisperProcessor(sounds, build_tokenizer()).save_pretrained(tmp_path / "whisper")
    write_image(tmp_path / "i.png", 0)
    write_sound(tmp_path / "a.wav", 0)
    picture, sound = str(tmp_path / "i.png"), str(tmp_path / "a.wav")
    expected = load_processor(str(tmp_path / "images"))(picture)["pixel_values"]
    llava = load_processor(str(tmp_path / "llava"))
    assert torch.equal(llava(picture)["pixel_values"], expected)
    with open(picture, "rb") as file:
        assert torch.equal(llava(file)["pixel_values"], expected)
    assert torch.equal(llava([picture, picture])["pixel_values"], torch.stack([expected] * 2))
    whisper = load_processor(str(tmp_path / "whisper"))
    assert whisper(sound)["input_features"].shape == (80, 100)
    with pytest.raises(ValueError, match="frames need an image processor"):
        whisper([picture])
    # One folder with both, like that of omni models; the item's kind decides.
    both = json.loads((tmp_path / "llava" / "processor_config.json").read_text())
    whisper_config = json.loads((tmp_path / "whisper" / "processor_config.json").read_text())
    both["feature_extractor"] = whisper_config["feature_extractor"]
    (tmp_path / "llava" / "processor_config.json").write_text(json.dumps(both))
    omni = load_processor(str(tmp_path / "llava"))
    assert torch.equal(omni(picture)["pixel_values"], expected)
    assert torch.equal(omni(sound)["input_features"], whisper(sound)["input_features"])


def test_items_of_other_shapes_name_sample_and_column(make_config, tmp_path):
    config = make_config(image="natural_size")
    write_image(tmp_path / "i6.png", 0, size=(5, 5))
    message = r"'vision', column 'images': an item of sample 's6'.*'s1'.*resize, crop or pad"
    with pytest.raises(DataError, match=message):
        StepBuilder(config, open_split(config, "train")).build([1, 6])
    alone = config.model_copy(update={"microbatches": config.batch_size})
    assert len(StepBuilder(alone, open_split(alone, "train")).build([1, 6]).microbatches) == 2


def test_a_truncated_image_names_file_sample_and_column(make_config, tmp_path):
    config = make_config()
    Image.effect_noise((300, 300), 50).save(tmp_path / "i1.png")
    content = (tmp_path / "i1.png").read_bytes()
    (tmp_path / "i1.png").write_bytes(content[: len(content) // 2])
    message = r"'s1' \(.*train.jsonl:2\), column 'images', file .*i1.png: cannot be read .*truncat"
    with pytest.raises(SampleError, match=message):
        StepBuilder(config, open_split(config, "train")).build([1])


def test_postscript_is_not_run(tmp_path):
    from raymm.data.samples.processors import read_image

    Image.new("RGB", (4, 4)).save(tmp_path / "i.eps")
    with pytest.raises(ValueError, match="PostScript"):
        read_image(str(tmp_path / "i.eps"))
