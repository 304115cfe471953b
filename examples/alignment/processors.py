"""From a media file to encoder input: the functions that a config names as processors.

A corrupt file raises (``OSError`` from Pillow, ``RuntimeError`` from libsndfile or
``ValueError``); the caller, who knows which sample it belongs to, adds the path.
"""

import functools
import math
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image
from scipy.signal import resample_poly
from transformers import WhisperFeatureExtractor

IMAGE_SIZE = 224  # pixels, both sides
IMAGE_MEAN, IMAGE_SCALE = 127.0, 128.0  # what EfficientNet-Lite was trained with

SAMPLE_RATE = 16_000  # Hz, Whisper's
# Whisper always encodes its whole window. The clips are short, so a window of 5 s instead
# of 30 s keeps most of them and costs a sixth.
AUDIO_WINDOW = 5  # s
AUDIO_POSITIONS = AUDIO_WINDOW * 50  # encoder output frames, 20 ms each
MEL_BINS = 80


def load_image(path: str | Path) -> dict[str, torch.Tensor]:
    """``pixel_values`` (3, 224, 224) float32, ``(x - 127) / 128`` of 0..255 RGB.

    Any Pillow mode and size: transparency is composited on white, the longer side becomes
    224 pixels, and white fills up the shorter one evenly on both ends.
    """
    with Image.open(path) as image:
        rgba = image.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    canvas.alpha_composite(rgba)
    scale = IMAGE_SIZE / max(rgba.size)
    size = tuple(max(1, round(side * scale)) for side in rgba.size)
    resized = canvas.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    square = Image.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    square.paste(resized, tuple((IMAGE_SIZE - side) // 2 for side in size))
    pixels = torch.from_numpy(np.array(square)).permute(2, 0, 1).float()
    return {"pixel_values": ((pixels - IMAGE_MEAN) / IMAGE_SCALE).contiguous()}


@functools.cache
def audio_feature_extractor() -> WhisperFeatureExtractor:
    """Whisper's log-mel extractor for a window of ``AUDIO_WINDOW`` seconds."""
    return WhisperFeatureExtractor(
        feature_size=MEL_BINS, sampling_rate=SAMPLE_RATE, chunk_length=AUDIO_WINDOW
    )


def load_audio(path: str | Path) -> dict[str, torch.Tensor]:
    """``input_features`` (80, 500) float32: log-mel frames of 10 ms.

    Any rate and number of channels libsndfile reads: channels are averaged, the rate becomes
    16 kHz. Shorter clips are padded with silence, longer ones cut at ``AUDIO_WINDOW`` seconds.

    Raises ``ValueError`` for a clip without samples or with NaN or infinity in it.
    """
    samples, rate = soundfile.read(path, dtype="float32", always_2d=True)  # (frames, channels)
    if not len(samples):
        raise ValueError("audio has no samples")
    if not np.isfinite(samples).all():
        raise ValueError("audio has NaN or infinite samples")
    mono = samples[: math.ceil(AUDIO_WINDOW * rate)].mean(axis=1)
    if rate != SAMPLE_RATE:
        common = math.gcd(rate, SAMPLE_RATE)
        mono = resample_poly(mono, SAMPLE_RATE // common, rate // common)
    features = audio_feature_extractor()(mono, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    return {"input_features": features["input_features"][0].float().contiguous()}
