"""Small files that claim to be huge, each valid for some library."""

import struct
import tarfile
import zlib
from pathlib import Path

import numpy as np
import soundfile


def png(path: Path, width: int = 20_000, height: int = 10_000) -> None:
    """Write a valid picture of one colour, row by row."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    packer = zlib.compressobj(1)
    rows = b"\0" * (width + 1) * 100
    data = b"".join(packer.compress(rows) for _ in range(height // 100)) + packer.flush()
    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")
    )


def gif(path: Path, frame: int = 60_000) -> None:
    """Write a small screen with a huge first frame."""
    path.write_bytes(
        b"GIF89a" + struct.pack("<HHBBB", 10, 10, 0, 0, 0)
        + b"," + struct.pack("<HHHHB", 0, 0, frame, frame, 0) + b"\x02\x02\x4c\x01\x00;"
    )


def webp(path: Path, side: int = 16_384) -> None:
    """Write an animation's canvas, which Pillow would allocate when it opens the file."""
    size = struct.pack("<I", side - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x02\0\0\0" + size + size
    body += b"ANIM" + struct.pack("<I", 6) + bytes(6)
    path.write_bytes(b"RIFF" + struct.pack("<I", len(body)) + body)


def tiff(path: Path, side: int = 50_000) -> None:
    """Write one strip of zeros that is missing."""
    tags = [(256, side), (257, side), (258, 8), (259, 1), (262, 1), (273, 8), (277, 1),
            (278, side), (279, 100)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    path.write_bytes(
        b"II*\0" + struct.pack("<I", 8) + struct.pack("<H", len(tags)) + entries + bytes(4)
    )


def bmp(path: Path, side: int = 30_000) -> None:
    """Write a header without pixels."""
    info = struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0)
    path.write_bytes(b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + info)


def jpeg(path: Path, side: int = 65_000) -> None:
    """Write a start of frame, nothing else."""
    frame = struct.pack(">BHHB", 8, side, side, 1) + b"\x01\x11\x00"
    path.write_bytes(b"\xff\xd8\xff\xc0" + struct.pack(">H", len(frame) + 2) + frame
                     + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\xff\xd9")


def flac(path: Path) -> None:
    """Write silence whose header claims 2**36 - 1 frames: 256 GiB as float32."""
    soundfile.write(path, np.zeros(4096, np.float32), 16_000, format="FLAC")
    content = bytearray(path.read_bytes())
    content[21] |= 0x0F  # STREAMINFO: the 36 bits after rate, channels and bits per sample
    content[22:26] = b"\xff" * 4
    path.write_bytes(content)


def sparse(path: Path, size: int = 2**40) -> None:
    """Write a sparse file of zeros."""
    with open(path, "wb") as file:
        file.truncate(size)


def shard(path: Path, size: int = 2**33) -> None:
    """Write a tar shard with a good sample, and one whose picture is a sparse range of its file."""
    with tarfile.open(path, "w") as out:
        from tests.support.same_rows import add_member

        add_member(out, "good.txt", b"a cat is a dog")
        add_member(out, "large.txt", b"a cat is a dog")
    with open(path, "r+b") as file:
        file.seek(4 * tarfile.BLOCKSIZE)  # two headers, two blocks of text
        member = tarfile.TarInfo("large.png")
        member.size = size
        file.write(member.tobuf(tarfile.GNU_FORMAT))
        file.truncate(5 * tarfile.BLOCKSIZE + size + 2 * tarfile.BLOCKSIZE)


IMAGES = {"png": png, "gif": gif, "webp": webp, "tif": tiff, "bmp": bmp, "jpg": jpeg}
