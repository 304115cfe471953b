"""Check for items that the processor of a model would silently truncate or complete with made-up
data."""

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

# Frames per second at which a list of frames is processed for comparison.
_RATES = (1.0, 4.0)


class ItemCheck:
    """Check of samples that runs the processor on modified versions of their items.

    A sound longer than the window of the feature extractor would be truncated, and frames without
    times would get times at a rate that the processor assumes. To detect this without code for
    single processors, a sample is processed with modified items and the results are compared. Only
    sounds and lists of frames that are longer than all earlier ones are checked.
    """

    def __init__(self, processor: ModelProcessor) -> None:
        self._processor = processor
        self._sounds: WholeSounds | None = None
        self._most_frames = 1  # longest list for which the frame rate made no difference

    def __call__(self, encoded: Conversation) -> None:
        """Raise a ``SampleError`` for a sound that is longer than the processor accepts, or a list
        of frames without a frame rate if the processor uses one."""
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
        items = list(encoded.media[kind])
        items[number] = item
        media: Mapping[str, Sequence[Any]] = {**encoded.media, kind: items}
        return self._processor([encoded.text], [media])


def clip_of_images(frames: Sequence[Any], fps: float) -> Clip:
    """Return a clip of RGB images at ``fps`` frames per second; raise a ``SampleError`` if sizes
    differ."""
    times = [number / fps for number in range(len(frames))]
    return Clip.from_frames([np.asarray(frame) for frame in frames], times)


def _item_error(encoded: Conversation, kind: str, number: int, reason: str) -> SampleError:
    sample = encoded.sample
    file = media_name(sample.media[kind][number])
    return SampleError(reason, sample.columns.get(kind), file, sample.id, sample.place or None)
