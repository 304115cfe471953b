"""Limits on the size of media items and of the text of a row, checked before decoding.

A single-colour image of 200 million pixels is a file of 200 kB, and an hour of silence in eight
channels is a file of 1 MB, so the header is checked instead of the size of the file.
"""

from dataclasses import dataclass

# Hz. Existing sound formats end at 768 kHz; resampling filters grow with the rate.
MAX_SAMPLE_RATE = 768_000
# Hz. Sounds count as at least mono at this rate, because a sound at 1 Hz grows to this rate when
# resampled.
REFERENCE_RATE = 48_000


@dataclass(frozen=True)
class Limits:
    """Limits of one item, set by the fields of the same names in the section ``data``.

    Attributes:
        max_image_pixels: width times height. Default: Pillow's limit, 256 MiB as RGB.
        max_audio_samples: frames times channels, at least those of mono at 48 kHz. Default: 1 GiB
            as float32, 93 minutes of mono.
        max_item_bytes: stored size of the file, tar member or Parquet value.
        max_row_group_bytes: size in memory of the columns that are read of one Parquet row group.
        max_video_seconds, max_video_frames: duration and frames of a video file, by its header.
            Default: 4 hours and a million frames; each frame is also limited by
            ``max_image_pixels``.
        max_text_characters: all texts of one row together.
    """

    max_image_pixels: int = 89_478_485
    max_audio_samples: int = 2**28
    max_item_bytes: int = 2**29
    max_row_group_bytes: int = 2**30
    max_video_seconds: int = 4 * 3600
    max_video_frames: int = 1_000_000
    max_text_characters: int = 2**24
