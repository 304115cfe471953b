"""Cheap fingerprints of files: sizes, and digests of small files and of samples of large ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from raymm.data.remote.path import DataPath, read_range, size_of, version_of

# Files up to this size are hashed completely. Of larger files, BLOCKS blocks at equal distances are
# hashed, including the first and the last; other changes that keep the size only show in the file
# time.
WHOLE_BYTES = 16 * 2**20
BLOCKS = 16
BLOCK_BYTES = 2**16
# Number of files read in parallel, and maximum number of files with separate digests; more files
# only have a common digest.
THREADS = 8
FILES_TOLD_APART = 256


def fingerprint_of_files(files: Iterable[DataPath], root: Path | None = None) -> dict[str, Any]:
    """Return plain JSON: ``{"files": {name: "size digest"} or their count, "bytes", "digest",
    "times"}``.

    Copying files elsewhere, also to a bucket, changes only ``times``. Raise an ``OSError`` if a
    file cannot be read, and a ``DataError`` if a server does not return a file.

    Args:
        files: in a meaningful order, on which ``digest`` and ``times`` depend.
        root: folder that names are relative to; by default names have no folders.
    """
    files = list(files)
    names = [
        str(file.relative_to(root)) if root and isinstance(file, Path) else file.name
        for file in files
    ]
    with ThreadPoolExecutor(THREADS) as pool:
        sizes = [size_of(file) for file in files]
        digests = list(pool.map(_digest, files, sizes))
    texts = {
        name: f"{size} bytes {digest}"
        for name, size, digest in zip(names, sizes, digests, strict=True)
    }
    return {
        "files": texts if len(texts) == len(files) <= FILES_TOLD_APART else len(files),
        "bytes": sum(sizes),
        "digest": _of_texts([f"{n} {d}" for n, d in zip(names, digests, strict=True)]),
        "times": _of_texts([str(version_of(file)) for file in files]),
    }


def _digest(file: DataPath, size: int) -> str:
    digest = xxhash.xxh3_64()
    if size <= WHOLE_BYTES:
        digest.update(read_range(file, 0, size) if size else b"")
    else:
        for block in range(BLOCKS):
            start = (size - BLOCK_BYTES) * block // (BLOCKS - 1)
            digest.update(read_range(file, start, BLOCK_BYTES))
    return digest.hexdigest()


def _of_texts(texts: Sequence[str]) -> str:
    return xxhash.xxh3_64("\n".join(texts).encode("utf-8", "surrogateescape")).hexdigest()
