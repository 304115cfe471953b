

from __future__ import annotations

import json

import numpy as np
import pytest
import soundfile
import transformers
from PIL import Image
from transformers import SiglipImageProcessor, WhisperFeatureExtractor
from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

from examples.vlm.kinds import KINDS
from raymm.data import DataConfig, local_steps, open_split, row_lengths
from raymm.data.samples.processors import WholeSounds, load_processor, read_audio, read_image
from raymm.errors import DataError, SampleError
from tests.support.sample_files import write_image, write_sound
from tests.support.tiny_folders import modalities, tiny


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


RATE = 16_000


def noise(samples, seed=0):
    values = np.random.default_rng(seed).standard_normal(samples)
    return (0.1 * values).astype(np.float32)


def whisper():
    return transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)


def extract(extractor):
    return lambda sound: extractor(
        sound, sampling_rate=extractor.sampling_rate, return_tensors="pt"
    )


@pytest.mark.parametrize("samples", [100, 8_000, 15_999, RATE, RATE + 100])
def test_audio_within_the_window_is_complete(samples):
    WholeSounds(RATE).check(noise(samples), extract(whisper()))


@pytest.mark.parametrize("seconds", [1.05, 3, 10])
def test_sounds_beyond_the_window_name_both_lengths(seconds):
    with pytest.raises(SampleError, match=rf"{seconds:.2f} s long, .* only its first 1\.00 s;"):
        WholeSounds(RATE).check(noise(int(seconds * RATE)), extract(whisper()))


def test_silence_beyond_the_window_is_refused_too():
    with pytest.raises(SampleError, match=r"3\.00 s long"):
        WholeSounds(RATE).check(np.zeros(3 * RATE, np.float32), extract(whisper()))


def test_an_extractor_that_crops_at_random_is_refused():
    extractor = transformers.ClapFeatureExtractor(truncation="rand_trunc", sampling_rate=RATE)
    with pytest.raises(SampleError, match="12.00 s long, and the processor crops"):
        WholeSounds(RATE).check(noise(12 * RATE), extract(extractor))


def test_only_longer_sounds_than_before_are_tried():
    calls, extractor = [], extract(whisper())

    def counted(sound):
        calls.append(len(sound))
        return extractor(sound)

    check = WholeSounds(RATE)
    check.check(noise(8_000), counted)
    tried = len(calls)
    check.check(noise(7_000, seed=1), counted)
    assert len(calls) == tried
    check.check(noise(9_000), counted)
    assert len(calls) > tried


# Windows in seconds of transformers' extractors that cut, with their default values.
WINDOWS = {
    "ASTFeatureExtractor": 10.26, "ClvpFeatureExtractor": 6.0,
    "Gemma3nAudioFeatureExtractor": 30.0, "Gemma4AudioFeatureExtractor": 29.99,
    "WhisperFeatureExtractor": 30.0,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(set(FEATURE_EXTRACTOR_MAPPING_NAMES.values())))
def test_extractors_take_all_audio_or_are_refused(name):
    try:
        extractor = getattr(transformers, name)()
    except ImportError as error:
        pytest.skip(str(error).strip().splitlines()[0])
    rate = getattr(extractor, "sampling_rate", None)
    if not isinstance(rate, int):
        pytest.skip("takes no sound")
    batched = name == "Gemma4AudioFeatureExtractor"  # can only squeeze a batch

    def features(sound):
        sounds = [sound] if batched else sound
        return extractor(sounds, sampling_rate=rate, return_tensors="pt")

    sound = noise(40 * rate)
    if name not in WINDOWS:
        WholeSounds(rate).check(sound, features)
        return
    with pytest.raises(SampleError, match=f"40.00 s long, .* its first {WINDOWS[name]:.2f} s;"):
        WholeSounds(rate).check(sound, features)


def test_extractor_folders_refuse_audio_that_would_be_cut(tmp_path):
    whisper().save_pretrained(tmp_path / "extractor")
    process = load_processor(str(tmp_path / "extractor"))
    for seconds in (1, 3):
        soundfile.write(tmp_path / f"{seconds}.wav", noise(seconds * RATE), RATE)
    assert tuple(process(str(tmp_path / "1.wav"))["input_features"].shape) == (16, 100)
    with pytest.raises(SampleError, match=r"3\.00 s long, but .* uses only its first 1\.00 s"):
        process(str(tmp_path / "3.wav"))


@pytest.mark.parametrize("kind", [kind for kind, spec in KINDS.items() if spec.sound])
def test_a_row_with_a_long_sound_names_the_file_and_both_lengths(kind, tmp_path):
    folder, _ = tiny(kind)
    rows = []
    for name, seconds in (("short", 1), ("long", 3)):
        soundfile.write(tmp_path / f"{name}.wav", noise(seconds * RATE), RATE)
        rows.append({"id": name, "audio": [f"{name}.wav"], "messages": [
            {"role": "user", "content": "<audio>How high is the sound?"},
            {"role": "assistant", "content": "A low tone."},
        ]})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig.model_validate({
        "train": str(tmp_path / "rows.jsonl"), "processor": folder,
        "modalities": modalities(kind), "batch_size": 1, "microbatches": 1, "shuffle": False,
    })
    said = r"sample 'long' .*long\.wav: the sound is 3\.00 s long, .* only its first 1\.00 s;"
    with pytest.raises(SampleError, match=said):
        list(local_steps(config, steps=2))
    with pytest.raises(SampleError, match=said):
        row_lengths(config, open_split(config, "train"), cache=tmp_path / "cache")
    skipping = config.model_copy(update={"on_error": "skip", "batch_size": 2})
    (step,) = local_steps(skipping, steps=1)
    assert [sample.id for sample in step.skipped] == ["long"]
