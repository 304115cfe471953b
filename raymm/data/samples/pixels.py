"""Conversion of an opened image to 8-bit RGB, for all storage formats."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

_WHITE_IS_ZERO = 0  # TIFF's PhotometricInterpretation, which Pillow leaves at 16 bits
_PHOTOMETRIC = 262


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to upright 8-bit RGB, as ``load_image`` of Hugging Face.

    The EXIF orientation is applied, transparent pixels become white, and the first frame or page is
    used. Grey of 10 to 16 bits is scaled by the white level of its format; Pillow would clip it at
    255. Colours of 16 bits lose the lower 8 bits. Raise a ``ValueError`` for 32-bit integers,
    signed integers or floats, whose white level is unknown, and for a transparent 16-bit colour.

    Args:
        image: just opened, not decoded yet.
    """
    from PIL import ImageOps

    grey = _Grey.of(image)
    clear = _transparent_colour(image)
    if image.format == "GIF" or getattr(image, "is_animated", False):
        image.seek(0)
    if grey is not None:
        return grey.to_rgb(ImageOps.exif_transpose(image), clear)
    if clear is not None:
        image.info["transparency"] = clear
    image = ImageOps.exif_transpose(image)
    if not image.has_transparency_data:
        return image.convert("RGB")
    if image.mode == "La":
        image = image.convert("LA")
    return _over_white(image.convert("RGBA"))


def _over_white(image: Image.Image) -> Image.Image:
    from PIL import Image

    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image).convert("RGB")


class _Grey:
    """Grey levels of more than 8 bits.

    Args:
        white: level of white; of black if ``inverted``.
        inverted: level 0 is white.
    """

    def __init__(self, white: int, inverted: bool) -> None:
        self.white, self.inverted = white, inverted

    @classmethod
    def of(cls, image: Image.Image) -> _Grey | None:
        """Return the grey levels of an image; None for 8 or fewer bits per channel."""
        if not image.mode.startswith(("I", "F")):
            return None
        stored = _raw_mode(image)
        # Pillow scales the pixels of PGM and JPEG 2000 to 16 bits.
        scaled = image.format == "PPM" or image.format == "JPEG2000"
        bits = re.fullmatch(r"I;(\d+)[BLNR]?", stored)
        if image.mode.startswith("F") or not (bits or scaled) or (bits and int(bits[1]) > 16):
            raise ValueError(
                f"its mode is {image.mode!r}, stored as {stored!r}, which does not define a value "
                "for white; accepted: up to 16 bits per channel, unsigned, or a processor function "
                "that reads the file"
            )
        tags = getattr(image, "tag_v2", {})
        inverted = tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
        return cls(2 ** (int(bits[1]) if bits and not scaled else 16) - 1, inverted)

    def to_rgb(self, image: Image.Image, clear: int | None) -> Image.Image:
        from PIL import Image

        levels = np.asarray(image).astype(np.int64)
        grey = (levels * 255 + self.white // 2) // self.white
        if self.inverted:
            grey = 255 - grey
        if clear is not None:
            grey[levels == clear] = 255  # over white
        return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def _raw_mode(image: Image.Image) -> str:
    """Return the storage format of the pixels, as named by Pillow's decoders."""
    for tile in getattr(image, "tile", ()):
        arguments = tile.args if isinstance(tile.args, tuple) else (tile.args,)
        if arguments and isinstance(arguments[0], str):
            return arguments[0]
    return image.mode


def _transparent_colour(image: Image.Image) -> int | None:
    """Return the transparent grey level of a PNG at the scale of the decoded levels. Raise a
    ``ValueError`` for a 16-bit colour, because only 8 of its bits are decoded."""
    clear = image.info.get("transparency")
    bits = re.fullmatch(r"(?:L|RGB);(\d+)B?", _raw_mode(image))
    if isinstance(clear, tuple) and bits and int(bits[1]) > 8:
        raise ValueError(
            f"its colours have {bits[1]} bits and one of them, {clear}, is transparent; accepted: "
            "an alpha channel"
        )
    if not isinstance(clear, int) or image.mode not in ("L", "I;16"):
        return None
    if image.mode == "L" and bits:
        return clear * 255 // (2 ** int(bits[1]) - 1)
    return clear
