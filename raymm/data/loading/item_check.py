"""Refuses items of which a model's processor would drop a part without a word, or invent one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from raymm.data.conversations.conversation import Conversation
from raymm.data.conversations.processor import ModelProcessor
from raymm.data.samples.media import media_name
from raymm.data.samples.whole_sounds import WholeSounds, equal_tensors
from raymm.data.video.frames import Clip
from raymm.errors import SampleError

# Rates of frames that are tried, in frames per second.
_RATES = (1.0, 4.0)


class ItemCheck:
    """Check of samples, which tries the processor on their own items.

    Sounds beyond the window of a feature extractor would be cut. Frames without times would get
    those of a rate that the processor assumes. Nothing is known of single processors: a sample is
    processed with changed items, and the results are compared. That happens for sounds and lists of
    frames that are longer than all before.

    Args:
        processor: of the model.
    """

    def __init__(self, processor: ModelProcessor) -> None:
        self._processor = processor
        self._sounds: WholeSounds | None = None
        self._most_frames = 1  # of a list whose rate makes no difference

    def __call__(self, encoded: Conversation) -> None:
        """
        Raises:
            SampleError: a sound is longer than what the processor takes, or a list of frames has no
                rate and needs one.
        """
        for number, sound in enumerate(encoded.media.get("audio", ())):
            self._check_sound(encoded, number, sound)
        for number, video in enumerate(encoded.media.get("video", ())):
            if not isinstance(video, Clip):
                self._check_frames(encoded, number, video)

    def _check_sound(self, encoded: Conversation, number: int, sound: np.ndarray) -> None:
        if self._sounds is None:
            self._sounds = WholeSounds(self._processor.sampling_rate)
        try:
            self._sounds.check(sound, lambda other: self._with(encoded, "audio", number, other))
        except SampleError as error:
            raise _item_error(encoded, "audio", number, error.reason) from None

    def _check_frames(self, encoded: Conversation, number: int, frames: Sequence[Any]) -> None:
        if len(frames) <= self._most_frames:
            return
        slow, fast = (
            self._with(encoded, "video", number, clip_of_images(frames, fps)) for fps in _RATES
        )
        if not equal_tensors(slow, fast):
            raise _item_error(
                encoded, "video", number,
                f"it is a list of {len(frames)} frames without times, but the processor passes "
                "times to the model; set data.modalities.video.fps (frames per second), or add "
                "'fps' or 'times' to the part of the message",
            )
        self._most_frames = len(frames)

    def _with(
        self, encoded: Conversation, kind: str, number: int, item: Any
    ) -> dict[str, torch.Tensor]:
        """Process a sample with another item in the place of one of its items."""
        items = list(encoded.media[kind])
        items[number] = item
        media: Mapping[str, Sequence[Any]] = {**encoded.media, kind: items}
        return self._processor([encoded.text], [media])


def clip_of_images(frames: Sequence[Any], fps: float) -> Clip:
    """Make a clip of images.

    Args:
        frames: ``PIL.Image`` in RGB.
        fps: frames per second.

    Raises:
        SampleError: the images are of several sizes.
    """
    times = [number / fps for number in range(len(frames))]
    return Clip.from_frames([np.asarray(frame) for frame in frames], times)


def _item_error(encoded: Conversation, kind: str, number: int, reason: str) -> SampleError:
    sample = encoded.sample
    file = media_name(sample.media[kind][number])
    return SampleError(reason, sample.columns.get(kind), file, sample.id, sample.place or None)
