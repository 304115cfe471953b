"""Image and audio processors and the callbacks after the encoders."""

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from transformers.modeling_outputs import BaseModelOutput

from examples.alignment.callbacks import pool_image_tokens, stack_audio_frames
from examples.alignment.processors import AUDIO_WINDOW, load_audio, load_image

WHITE = (255 - 127) / 128


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1"])
@pytest.mark.parametrize("size", [(1, 1), (12, 7), (3, 500), (640, 1), (224, 224)])
def test_every_mode_and_size_gives_the_same_shape(tmp_path, mode, size):
    path = tmp_path / "picture.png"
    Image.new("RGB", size, (10, 200, 30)).convert(mode).save(path)
    pixels = load_image(path)["pixel_values"]
    assert pixels.shape == (3, 224, 224) and pixels.dtype == torch.float32
    assert torch.isfinite(pixels).all() and pixels.min() >= -127 / 128 and pixels.max() <= 1


def test_values_and_padding(tmp_path):
    path = tmp_path / "wide.png"
    Image.new("RGB", (200, 100), (255, 127, 0)).save(path)
    pixels = load_image(path)["pixel_values"]
    inside = pixels[:, 112, 112]
    assert torch.allclose(inside, torch.tensor([1.0, 0.0, -127 / 128]))
    assert (pixels[:, :56] == WHITE).all() and (pixels[:, 168:] == WHITE).all()
    assert (pixels[2, 57:167] < 0).all()  # aspect ratio kept: 112 rows of picture


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_white_over_any_hidden_colour(tmp_path, mode):
    path = tmp_path / "clear.png"
    if mode == "P":
        image = Image.new("P", (20, 20), 0)
        image.putpalette([0, 0, 0, 255, 0, 0])
        image.save(path, transparency=0)
    else:
        Image.new(mode, (20, 20), (0,) * len(mode)).save(path)
    assert (load_image(path)["pixel_values"] == WHITE).all()


def test_half_transparent_black_is_mid_grey(tmp_path):
    path = tmp_path / "half.png"
    Image.new("RGBA", (224, 224), (0, 0, 0, 128)).save(path)
    assert load_image(path)["pixel_values"].sub(0).abs().max() < 0.02


def test_corrupt_pictures_raise(tmp_path):
    path = tmp_path / "picture.png"
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    whole = path.read_bytes()
    for data in (b"", b"not a picture", whole[: len(whole) // 2]):
        path.write_bytes(data)
        with pytest.raises((OSError, SyntaxError)):
            load_image(path)


def _tone(rate: int, seconds: float, channels: int = 1) -> np.ndarray:
    wave = 0.5 * np.sin(2 * np.pi * 440 * np.arange(int(rate * seconds)) / rate)
    return np.repeat(wave[:, None], channels, axis=1)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize("channels", [1, 2])
def test_rate_and_channels_do_not_matter(tmp_path, rate, channels):
    expected_path, path = tmp_path / "expected.wav", tmp_path / "clip.wav"
    soundfile.write(expected_path, _tone(16000, 1.5), 16000)
    soundfile.write(path, _tone(rate, 1.5, channels), rate)
    expected = load_audio(expected_path)["input_features"]
    features = load_audio(path)["input_features"]
    assert features.shape == (80, AUDIO_WINDOW * 100) and features.dtype == torch.float32
    assert torch.equal(features[:, 20:120].argmax(0), expected[:, 20:120].argmax(0))
    loudest = expected[:, 20:120].amax(0)
    assert torch.allclose(features[:, 20:120].amax(0), loudest, atol=0.02)
    assert features[:, 200:].max() < loudest.min() - 0.5  # silence after the clip


@pytest.mark.parametrize("seconds", [0.01, AUDIO_WINDOW, AUDIO_WINDOW + 3])
def test_short_and_long_clips_fit_the_window(tmp_path, seconds):
    path = tmp_path / "clip.ogg"
    soundfile.write(path, _tone(16000, seconds), 16000)
    features = load_audio(path)["input_features"]
    assert features.shape == (80, 500) and torch.isfinite(features).all()


def test_corrupt_clips_raise(tmp_path):
    path = tmp_path / "clip.wav"
    path.write_bytes(b"RIFF nonsense")
    with pytest.raises(RuntimeError):
        load_audio(path)
    soundfile.write(path, np.zeros((0, 1)), 8000)
    with pytest.raises(ValueError, match="no samples"):
        load_audio(path)
    soundfile.write(path, np.array([0.0, np.nan, 0.1]), 8000, subtype="FLOAT")
    with pytest.raises(ValueError, match="NaN"):
        load_audio(path)


@pytest.mark.parametrize("wrap", [lambda t: t, lambda t: (t, None), BaseModelOutput])
def test_callbacks_take_every_kind_of_output(wrap):
    features = torch.arange(2 * 5 * 7 * 7, dtype=torch.float32).reshape(2, 5, 7, 7)
    tokens = pool_image_tokens({}, wrap(features))
    assert tokens.shape == (2, 16, 5)
    # adaptive pooling of 7 cells to 4: the first bin covers cells 0 and 1
    assert torch.allclose(tokens[1, 0], features[1, :, :2, :2].mean((1, 2)))
    assert torch.allclose(tokens[1, 1], features[1, :, :2, 1:4].mean((1, 2)))

    frames = torch.arange(2 * 30 * 3, dtype=torch.float32).reshape(2, 30, 3)
    stacked = stack_audio_frames({}, wrap(frames))
    assert stacked.shape == (2, 3, 30)
    assert torch.equal(stacked[1, 2], frames[1, 20:30].reshape(-1))


def test_callbacks_refuse_other_shapes():
    with pytest.raises(ValueError, match="multiple of 10"):
        stack_audio_frames({}, torch.zeros(1, 25, 3))
    with pytest.raises(ValueError, match=r"expected \(B, D, H, W\)"):
        pool_image_tokens({}, torch.zeros(1, 25, 3))
    with pytest.raises(TypeError, match="encoder output is a dict"):
        pool_image_tokens({}, {"a": 1})
