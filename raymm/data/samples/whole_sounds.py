"""Check for sounds that a feature extractor would silently truncate.

Extractors have a maximum length (30 s for Whisper) under various names, truncate longer sounds by
default, and report nothing. The check therefore runs the extractor itself: if a longer sound, or
one with a different beginning, has the same features, then the features omit part of the sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from raymm.errors import USER_CODE_RAISES, SampleError

# Seconds of noise that replace the beginning of a sound, or are appended to it.
_NOISE_S = 0.1
# Seconds at the end of a sound that may be less than a frame of the extractor.
_FRAME_S = 0.02

Extract = Callable[[np.ndarray], Mapping[str, Any]]
Features = dict[str, torch.Tensor]


class WholeSounds:
    """Check of the sounds of one extractor, with ``rate`` samples per second. Only sounds that are
    longer than all accepted ones are checked."""

    def __init__(self, rate: int) -> None:
        self._rate, self._longest = rate, 0

    def check(self, sound: np.ndarray, extract: Extract) -> None:
        """Raise a ``SampleError`` for a sound, (samples,) float32, that is not used completely.
        ``extract`` returns all tensors for a sound."""
        if len(sound) <= self._longest:
            return
        noise = np.random.default_rng(0).standard_normal(int(_NOISE_S * self._rate))
        noise = (noise * (float(np.abs(sound).max()) or 1.0)).astype(sound.dtype)
        features, length = _extracted(sound, extract), f"{len(sound) / self._rate:.2f} s"
        if len(sound) > len(noise) and equal_tensors(
            features, _extracted(np.concatenate([noise, sound[len(noise) :]]), extract)
        ):
            raise SampleError(
                f"the sound is {length} long, and the processor crops its beginning; split the "
                "sound into several items or rows"
            )
        used = len(sound) if self._is_open(sound, noise, features, extract) else self._taken(
            sound, features, extract
        )
        if len(sound) - used > _FRAME_S * self._rate:
            most = f"{used / self._rate:.2f} s"
            raise SampleError(
                f"the sound is {length} long, but the processor uses only its first {most}; "
                f"accepted: sounds of up to {most}. Split the sound into several items or rows"
            )
        self._longest = len(sound)

    def _is_open(
        self, sound: np.ndarray, noise: np.ndarray, features: Features, extract: Extract
    ) -> bool:
        """Return True if a longer sound has other features, or is refused by the extractor."""
        try:
            longer_features = _extracted(np.concatenate([sound, noise]), extract)
        except USER_CODE_RAISES:
            return True
        return not equal_tensors(features, longer_features)

    def _taken(self, sound: np.ndarray, features: Features, extract: Extract) -> int:
        """Return the number of first samples that have the same features as the entire sound."""
        least, most = 0, len(sound)
        while most - least > _FRAME_S * self._rate / 4:
            middle = (least + most) // 2
            if equal_tensors(features, _extracted(sound[:middle], extract)):
                most = middle
            else:
                least = middle
        return most


def _extracted(sound: np.ndarray, extract: Extract) -> Features:
    """Return features with fixed random numbers, because some extractors add noise or crop
    randomly."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            np.random.seed(0)
            return {name: torch.as_tensor(value) for name, value in extract(sound).items()}
    finally:
        np.random.set_state(state)


def equal_tensors(left: Features, right: Features) -> bool:
    """Return True if two results of a processor have equal tensors."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )
