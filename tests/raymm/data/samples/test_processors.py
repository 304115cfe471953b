import json

import numpy as np
import pytest
import soundfile
from PIL import Image
from transformers import SiglipImageProcessor, WhisperFeatureExtractor

from raymm.data.samples.processors import load_processor, read_audio, read_image
from raymm.errors import DataError
from tests.support.sample_files import write_image, write_sound


def test_transparency_is_white(tmp_path):
    Image.new("RGBA", (2, 1), (255, 0, 0, 0)).save(tmp_path / "rgba.png")
    Image.new("LA", (2, 1), (0, 0)).save(tmp_path / "la.png")
    palette = Image.new("P", (2, 1), 0)
    palette.putpalette([0, 0, 0])
    palette.save(tmp_path / "p.png", transparency=0)
    for name in ("rgba", "la", "p"):
        image = read_image(str(tmp_path / f"{name}.png"))
        assert image.mode == "RGB" and image.getpixel((1, 0)) == (255, 255, 255)


def test_audio_is_mono_at_the_requested_rate(tmp_path):
    path = str(tmp_path / "a.wav")
    time = np.arange(16000) / 16000
    tone = 0.5 * np.sin(2 * np.pi * 440 * time)
    soundfile.write(path, np.stack([tone, np.zeros_like(tone)], axis=1), 16000)
    wave = read_audio(path, 8000)
    assert wave.dtype == np.float32 and wave.shape == (8000,)
    np.testing.assert_allclose(wave[100:-100], tone[::2][100:-100] / 2, atol=2e-3)


def test_hugging_face_folders(tmp_path):
    for name, processor in {
        "image": SiglipImageProcessor(size={"height": 16, "width": 16}),
        "audio": WhisperFeatureExtractor(feature_size=80, chunk_length=1),
    }.items():
        processor.save_pretrained(tmp_path / name)
    write_image(tmp_path / "i.png", 0)
    write_sound(tmp_path / "a.wav", 0)
    image = load_processor(str(tmp_path / "image"))(str(tmp_path / "i.png"))
    assert {key: tuple(value.shape) for key, value in image.items()} == {
        "pixel_values": (3, 16, 16)
    }
    sound = load_processor(str(tmp_path / "audio"))(str(tmp_path / "a.wav"))
    assert tuple(sound["input_features"].shape) == (80, 100)


@pytest.mark.parametrize(
    "name", ["nowhere", "no.such.module:fn", "tests.support.media_processors:missing",
        "tests.support.media_processors:np"]
)
def test_unknown_processors_name_field_and_value(name):
    with pytest.raises(DataError, match=f"data.vision: .*{name}"):
        load_processor(name, "data.vision")


def test_folders_without_a_processor(tmp_path):
    with pytest.raises(DataError, match="no preprocessor_config.json"):
        load_processor(str(tmp_path))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(DataError, match="cannot load"):
        load_processor(str(tmp_path))
