"""Folder with one file of features per item: bytes with a checksum, without pickled data.

A folder belongs to one frozen encoder in one precision, which its name identifies. Files that are
damaged or have another format count as missing, and their features are computed again.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

_MAGIC = b"raymm features 2"
_HEAD = struct.Struct("<QI")  # checksum of everything after it; bytes of the description
_SUFFIX = ".features"
# Tensors of an item, by name.
Features = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FeatureFolder:
    """Folder with the features of one encoder, of at most ``room`` bytes. Features beyond it are
    computed every time: replacing stored ones would not help when the same items are read
    repeatedly."""

    path: Path
    room: int

    def file(self, key: str) -> Path:
        return self.path / key[:2] / (key + _SUFFIX)

    def has(self, key: str) -> bool:
        """Return True if a file exists for a key; only :meth:`read` checks that it is intact."""
        return self.file(key).is_file()

    def read(self, key: str) -> Features | None:
        """Return stored features; None if they are missing or damaged. A damaged file is
        removed."""
        file = self.file(key)
        try:
            data = file.read_bytes()
        except OSError:
            return None
        features = _unpacked(data, key)
        if features is None:
            file.unlink(missing_ok=True)
        return features

    def write(self, key: str, features: Features) -> int:
        """Store an item's features on the CPU, of any shapes and dtypes, atomically; return the
        bytes written.

        Raises:
            OSError: the file cannot be written.
        """
        file = self.file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        data = _packed(key, features)
        handle, partial = tempfile.mkstemp(dir=file.parent, prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as out:
                out.write(data)
            os.replace(partial, file)
        except BaseException:
            os.unlink(partial)
            raise
        return len(data)

    def size(self, key: str, features: Features) -> int:
        values = sum(tensor.nbytes for tensor in features.values())
        return len(_MAGIC) + _HEAD.size + len(_description(key, features)) + values

    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.path.glob(f"??/*{_SUFFIX}"))


def make_room(root: Path, keep: Iterable[Path], room: int) -> list[Path]:
    """Remove folders of other encoders, least recently changed first, until all folders fit into
    ``room`` bytes; return the removed ones."""
    used = {path.resolve() for path in keep}
    folders = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    sizes = {path: FeatureFolder(path, 0).bytes() for path in folders}
    total, removed = sum(sizes.values()), []
    for path in sorted(folders, key=lambda path: path.stat().st_mtime_ns):
        if total <= room or path.resolve() in used:
            continue
        shutil.rmtree(path, ignore_errors=True)
        total -= sizes[path]
        removed.append(path)
    return removed


def _checksum(data: bytes | memoryview) -> int:
    import xxhash  # only ranks that store features need it

    return xxhash.xxh3_64(data).intdigest()


def _description(key: str, features: Features) -> bytes:
    tensors = [
        {
            "name": name,
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
        }
        for name, tensor in features.items()
    ]
    return json.dumps({"key": key, "tensors": tensors}).encode()


def _packed(key: str, features: Features) -> bytes:
    text, values = _description(key, features), b""
    for tensor in features.values():
        flat = tensor.detach().contiguous().reshape(-1)
        values += flat.view(torch.uint8).numpy().tobytes()
    checksum = _checksum(text + values)
    return _MAGIC + _HEAD.pack(checksum, len(text)) + text + values


def _unpacked(data: bytes, key: str) -> Features | None:
    start = len(_MAGIC) + _HEAD.size
    if len(data) < start or not data.startswith(_MAGIC):
        return None
    checksum, length = _HEAD.unpack_from(data, len(_MAGIC))
    body = memoryview(data)[start:]
    if _checksum(body) != checksum:
        return None
    description = json.loads(bytes(body[:length]))
    if description["key"] != key:
        return None
    values, features = body[length:], {}
    for tensor in description["tensors"]:
        feature = torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        flat_bytes = feature.reshape(-1).view(torch.uint8).numpy()
        flat_bytes[:] = np.frombuffer(values[: feature.nbytes], np.uint8)
        features[tensor["name"]] = feature
        values = values[feature.nbytes :]
    return features
