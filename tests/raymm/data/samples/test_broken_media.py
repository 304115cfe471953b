"""Unusual and broken media: correct numbers, or an error of the sample with the reason.

Images above 8 bits, audio that is cut off or contains NaN, text with half a character. All files
are really written.
"""

import io
import json
import struct
import sys
import zlib

import numpy as np
import pytest
import soundfile
from PIL import Image

from raymm.data import StepBuilder, open_split
from raymm.data.samples.headers import Limits, check_media
from raymm.data.samples.processors import read_audio, read_image
from raymm.errors import SampleError
from tests.support.sample_files import write_image, write_sound

LEVELS = np.array([[0, 257, 256 * 128, 65535]], dtype=np.uint16)
SHOWN = [0, 1, 128, 255]  # of 255


def grey_of(path) -> list[int]:
    image = read_image(str(path))
    assert image.mode == "RGB"
    pixels = np.asarray(image)
    assert (pixels == pixels[..., :1]).all()
    return pixels[0, :, 0].tolist()


def png(width: int, depth: int, colour: int, row: bytes, transparent: bytes = b"") -> bytes:
    """Return a PNG file of one row."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(
            ">I", zlib.crc32(kind + data))  # fmt: skip

    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))
        + (chunk(b"tRNS", transparent) if transparent else b"")
        + chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    )


def test_grey_of_16_bits_is_scaled(tmp_path):
    image = Image.fromarray(LEVELS)
    image.save(tmp_path / "a.png")
    image.save(tmp_path / "a.tif")
    image.save(tmp_path / "packed.tif", compression="tiff_lzw")
    image.save(tmp_path / "a.jp2", irreversible=False)
    Image.fromarray(LEVELS.astype(">u2")).save(tmp_path / "big.tif")
    (tmp_path / "a.pgm").write_bytes(b"P5 4 1 65535\n" + LEVELS.astype(">u2").tobytes())
    for name in ("a.png", "a.tif", "packed.tif", "a.jp2", "big.tif", "a.pgm"):
        assert grey_of(tmp_path / name) == SHOWN, name
    image.save(tmp_path / "white_is_zero.tif", tiffinfo={262: 0})
    assert grey_of(tmp_path / "white_is_zero.tif") == [255 - level for level in SHOWN]
    few = np.array([0, 1023 // 255, 512, 1023], dtype=">u2")
    (tmp_path / "ten_bits.pgm").write_bytes(b"P5 4 1 1023\n" + few.tobytes())
    assert grey_of(tmp_path / "ten_bits.pgm") == [0, 1, 128, 255]


def test_16_bit_grey_with_transparency_and_orientation(tmp_path):
    data = struct.pack(">4H", 0, 257, 32768, 65535)
    (tmp_path / "t.png").write_bytes(png(4, 16, 0, data, struct.pack(">H", 257)))
    assert grey_of(tmp_path / "t.png") == [0, 255, 128, 255]
    exif = Image.Exif()
    exif[274] = 3  # half a turn
    Image.fromarray(LEVELS).save(tmp_path / "turned.png", exif=exif)
    assert grey_of(tmp_path / "turned.png") == SHOWN[::-1]


def test_few_bits_and_colour_of_16_bits(tmp_path):
    (tmp_path / "4.png").write_bytes(png(2, 4, 0, bytes([0x0F]), struct.pack(">H", 0)))
    assert grey_of(tmp_path / "4.png") == [255, 255]
    (tmp_path / "1.png").write_bytes(png(2, 1, 0, bytes([0x40])))
    assert grey_of(tmp_path / "1.png") == [0, 255]
    colour = struct.pack(">6H", 65535, 0, 32768, 255, 256, 511)
    (tmp_path / "rgb.png").write_bytes(png(2, 16, 2, colour))
    assert np.asarray(read_image(str(tmp_path / "rgb.png"))).tolist() == [
        [[255, 0, 128], [0, 1, 1]]
    ]
    (tmp_path / "t.png").write_bytes(png(2, 16, 2, colour, struct.pack(">3H", 65535, 0, 0)))
    with pytest.raises(ValueError, match=r"16 bits and one of them, \(65535, 0, 0\), is transp"):
        read_image(str(tmp_path / "t.png"))


@pytest.mark.parametrize(
    ("values", "mode"), [(np.float32, "F"), (np.int32, "I"), (np.uint32, "I")]
)
def test_floats_and_32_bits_are_refused_by_mode(tmp_path, values, mode):
    Image.fromarray(LEVELS.astype(np.float32 if mode == "F" else np.int32)).save(
        tmp_path / "a.tif", tiffinfo={} if values is not np.uint32 else {339: 1}
    )
    with pytest.raises(ValueError, match=f"its mode is '{mode}'.*value for white; accepted: .*16"):
        read_image(str(tmp_path / "a.tif"))


def test_other_modes_keep_their_colours(tmp_path):
    Image.new("CMYK", (2, 1), (0, 255, 255, 0)).save(tmp_path / "a.tif")
    assert read_image(str(tmp_path / "a.tif")).getpixel((0, 0)) == (255, 0, 0)
    Image.new("LA", (2, 1), (100, 255)).save(tmp_path / "la.png")
    assert grey_of(tmp_path / "la.png") == [100, 100]
    frames = [Image.new("RGB", (2, 1), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:], lossless=True)
    for name in ("a.gif", "a.webp"):
        assert read_image(str(tmp_path / name)).getpixel((0, 0)) == (255, 0, 0), name
    Image.new("RGB", (4, 2), "red").save(tmp_path / "turned.jpg", exif=turned())
    assert read_image(str(tmp_path / "turned.jpg")).size == (2, 4)


def turned() -> Image.Exif:
    exif = Image.Exif()
    exif[274] = 6  # a quarter turn
    return exif


def test_sounds_that_are_cut_off_are_refused_by_their_header(tmp_path):
    wave = np.random.default_rng(0).uniform(-0.5, 0.5, 8000).astype(np.float32)
    for kind in ("WAV", "WAVEX", "AIFF", "AU", "W64", "RF64", "FLAC", "OGG", "CAF"):
        path = tmp_path / f"a.{kind.lower()}"
        soundfile.write(path, wave, 16000, format=kind)
        assert len(read_audio(str(path), 16000)) == 8000, kind
        check_media(str(path), Limits())
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(Exception, match="cut off|malformed|lost sync"):
            read_audio(str(path), 16000)
        # requires reading to the end; the first bytes do not show it
        if kind not in ("FLAC", "W64"):
            with pytest.raises(ValueError, match="cut off|malformed"):
                check_media(str(path), Limits())


def test_a_sound_that_was_piped_has_no_length_in_its_header(tmp_path):
    file = io.BytesIO()
    soundfile.write(file, np.ones(100, dtype=np.int16), 16000, format="WAV")
    content = bytearray(file.getvalue())
    content[4:8] = content[40:44] = b"\xff" * 4
    (tmp_path / "a.wav").write_bytes(content)
    assert len(read_audio(str(tmp_path / "a.wav"), 16000)) == 100


def test_integers_are_scaled_and_floats_are_unchanged(tmp_path):
    for dtype, kind in ((np.int16, "PCM_16"), (np.int32, "PCM_32")):
        top = np.iinfo(dtype).max
        sound = np.array([0, top // 2 + 1, -top - 1], dtype=dtype)
        soundfile.write(tmp_path / "a.wav", sound, 16000, kind)
        assert read_audio(str(tmp_path / "a.wav"), 16000).tolist() == [0, 0.5, -1]
    soundfile.write(tmp_path / "a.wav", np.array([0.5, 3.0], dtype=np.float32), 16000, "FLOAT")
    assert read_audio(str(tmp_path / "a.wav"), 16000).tolist() == [0.5, 3.0]
    soundfile.write(tmp_path / "a.wav", np.zeros(0, dtype=np.float32), 16000)
    with pytest.raises(ValueError, match="no sound"):
        read_audio(str(tmp_path / "a.wav"), 16000)


def build(config, index: int):
    return StepBuilder(config, open_split(config, "train")).build([index])


def test_broken_media_are_errors_of_the_sample(make_config, tmp_path):
    """Break rows of ``write_rows``: 1 has an image, 2 has audio."""
    vision = {"column": "images", "processor": "tests.support.media_processors:from_picture",
        "input": "image"}
    audio = {"column": "audio", "processor": "tests.support.media_processors:sound"}
    config = make_config(modalities={"vision": vision, "audio": audio})
    Image.fromarray(LEVELS.astype(np.float32)).save(tmp_path / "i1.png", format="TIFF")
    soundfile.write(tmp_path / "a2.wav", np.array([0, np.nan, np.inf] * 2, dtype=np.float32),
                    16000, "FLOAT")
    skipping = config.model_copy(update={"on_error": "skip"})
    for index, said in (
        (1, r"'s1' .*column 'images', file .*i1.png: cannot be read .*its mode is 'F'"),
        (2, r"'s2' .*column 'audio', file .*a2.wav: .*4 of 6 samples are not finite.* \(nan\) in "
            "frame 1"),
    ):  # fmt: skip
        with pytest.raises(SampleError, match=said):
            build(config, index)
    write_sound(tmp_path / "a7.wav", 7)
    content = (tmp_path / "a7.wav").read_bytes()
    (tmp_path / "a7.wav").write_bytes(content[:-100])
    with pytest.raises(SampleError, match=r"'s7' .*file .*a7.wav: the file is cut off: its header"):
        build(config, 7)
    write_image(tmp_path / "i6.png", 6)
    built = StepBuilder(skipping, open_split(skipping, "train")).build([1, 2, 5, 6, 7])
    assert [one.id for one in built.skipped] == ["s1", "s2", "s7"]


def leaving(image):
    """Exit the program, as a processor."""
    sys.exit(0)


def test_a_processor_that_calls_exit_is_an_error_of_the_sample(make_config):
    """Catch the exit, which would end the driver with 0, or the data worker."""
    vision = {"column": "images", "processor": f"{__name__}:leaving", "input": "image"}
    config = make_config(modalities={"vision": vision}, ignore_columns=["audio"])
    with pytest.raises(SampleError, match="'s1' .*i1.png: cannot be read .SystemExit: 0"):
        build(config, 1)
    skipping = config.model_copy(update={"on_error": "skip"})
    built = StepBuilder(skipping, open_split(skipping, "train")).build([0, 1])
    assert [one.id for one in built.skipped] == ["s1"]


def test_half_characters_are_errors_of_the_sample(make_config, tmp_path):
    config = make_config(modalities={})
    rows = [
        {"id": "a", "text": "a cat \ud800 is"},
        {"id": "b", "messages": [{"role": "user", "content": "what"},
                                 {"role": "assistant", "content": "a \udfff cat"}]},
        {"id": "c", "text": "a cat \x00 is a dog"},
        {"id": "d", "text": "a cat \U0001f600 is a dog"},
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for index, said in (
        (0, r"'a' \(.*train.jsonl:1\), column 'text': the text has a lone surrogate, U\+D800, at "
            "character 6"),
        (1, r"'b' .*column 'messages': messages\[1\] has a lone surrogate, U\+DFFF"),
    ):  # fmt: skip
        with pytest.raises(SampleError, match=said) as caught:
            build(config, index)
        str(caught.value).encode()  # printable
    for index in (2, 3):
        assert len(build(config, index).microbatches) == 1
