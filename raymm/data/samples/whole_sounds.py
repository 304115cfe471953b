"""Refuses sounds of which a feature extractor would drop a part.

Extractors have a longest sound (30 s for Whisper's) under various names, cut what is longer by
default, and report nothing. Here the extractor itself is tried: where a longer sound has the same
features, or another beginning has, a part of the sound is not in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from raymm.errors import USER_CODE_RAISES, SampleError

# Seconds of noise that take the place of a beginning, or follow a sound.
_NOISE_S = 0.1
# Seconds at the end of a sound that may be no whole frame of the extractor.
_FRAME_S = 0.02

Extract = Callable[[np.ndarray], Mapping[str, Any]]
Features = dict[str, torch.Tensor]


class WholeSounds:
    """Check of the sounds of one extractor.

    A sound is tried if it is longer than all that were taken whole, so of many sounds a few are.

    Args:
        rate: samples per second.
    """

    def __init__(self, rate: int) -> None:
        self._rate, self._longest = rate, 0

    def check(self, sound: np.ndarray, extract: Extract) -> None:
        """Refuse a sound that is not taken whole.

        Args:
            sound: (samples,) float32.
            extract: makes all tensors that come of a sound.

        Raises:
            SampleError: names the lengths of the sound and of what is taken of it.
        """
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
        taken = len(sound) if self._is_open(sound, noise, features, extract) else self._taken(
            sound, features, extract
        )
        if len(sound) - taken > _FRAME_S * self._rate:
            most = f"{taken / self._rate:.2f} s"
            raise SampleError(
                f"the sound is {length} long, but the processor uses only its first {most}; "
                f"accepted: sounds of up to {most}. Split the sound into several items or rows"
            )
        self._longest = len(sound)

    def _is_open(
        self, sound: np.ndarray, noise: np.ndarray, features: Features, extract: Extract
    ) -> bool:
        """Return whether a sound that goes on has other features, or is refused."""
        try:
            longer = _extracted(np.concatenate([sound, noise]), extract)
        except USER_CODE_RAISES:
            return True
        return not equal_tensors(features, longer)

    def _taken(self, sound: np.ndarray, features: Features, extract: Extract) -> int:
        """Return how many of the first samples have the features of the whole sound."""
        least, most = 0, len(sound)
        while most - least > _FRAME_S * self._rate / 4:
            middle = (least + most) // 2
            if equal_tensors(features, _extracted(sound[:middle], extract)):
                most = middle
            else:
                least = middle
        return most


def _extracted(sound: np.ndarray, extract: Extract) -> Features:
    """Features with the same random numbers each time: some extractors add noise or crop."""
    state = np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            np.random.seed(0)
            return {name: torch.as_tensor(value) for name, value in extract(sound).items()}
    finally:
        np.random.set_state(state)


def equal_tensors(left: Features, right: Features) -> bool:
    """Return whether two results of a processor have the same tensors."""
    return left.keys() == right.keys() and all(
        torch.equal(value, right[name]) for name, value in left.items()
    )
