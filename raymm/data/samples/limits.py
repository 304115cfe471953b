"""How large a media item and the text of a row may be, checked before they are decoded.

A picture of one colour with 200 million pixels is a file of 200 kB, and an hour of silence in
eight channels one of 1 MB: what a file becomes is told by its header, not by its size.
"""

from dataclasses import dataclass

# Formats of sound that exist stop at 768 kHz; resampling filters grow with the rate.
MAX_SAMPLE_RATE = 768_000
# Headers of sound are compared with mono of this rate at least: a second of sound at 1 Hz would
# become as long when resampled.
REFERENCE_RATE = 48_000


@dataclass(frozen=True)
class Limits:
    """Limits of one item; fields of the same names in ``data`` of a configuration set them.

    Attributes:
        max_image_pixels: width times height. Default: Pillow's own, 256 MiB as RGB.
        max_audio_samples: frames times channels, at least those of mono at 48 kHz. Default:
            1 GiB as float32, 93 minutes of mono.
        max_item_bytes: of the file, tar member or Parquet value, as stored.
        max_row_group_bytes: of the columns that are read of one Parquet row group, in memory.
        max_video_seconds, max_video_frames: of a video file, by its header. Default: 4 hours, and a
            million frames; ``max_image_pixels`` is of each.
        max_text_characters: of all texts of one row together.
    """

    max_image_pixels: int = 89_478_485
    max_audio_samples: int = 2**28
    max_item_bytes: int = 2**29
    max_row_group_bytes: int = 2**30
    max_video_seconds: int = 4 * 3600
    max_video_frames: int = 1_000_000
    max_text_characters: int = 2**24
