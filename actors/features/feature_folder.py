"""Features of items in a folder, a file each: bytes with a checksum, nothing that is unpickled.

A folder is of one frozen encoder in one precision; its name says which. What is damaged, or of
another format, is not there: who asks computes it again.
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
_HEAD = struct.Struct("<QI")  # checksum of all that follows; bytes of the description
_SUFFIX = ".features"
# Of an item, tensors by name.
Features = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FeatureFolder:
    """Where features of one encoder lie.

    Attributes:
        path: the folder; it is made by the first that is kept.
        room: bytes that it may take; what is beyond is not kept, and so computed every time. Who
            goes through the same items again and again has nothing of keeping the last ones.
    """

    path: Path
    room: int

    def file(self, key: str) -> Path:
        """Where the features of a key lie.

        Args:
            key: of an item, hexadecimal.
        """
        return self.path / key[:2] / (key + _SUFFIX)

    def has(self, key: str) -> bool:
        """Whether there is something under a key; whether it is whole, :meth:`read` says."""
        return self.file(key).is_file()

    def read(self, key: str) -> Features | None:
        """Features as they were written; None if they are not there or damaged, in which case
        their file goes.

        Args:
            key: of an item.
        """
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
        """Keep an item's features, whole or not at all; returns the bytes written.

        Args:
            key: of the item.
            features: of any shapes and dtypes, on the CPU.

        Raises:
            OSError: it cannot be written.
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
        """Return the bytes that :meth:`write` would write, counted without packing.

        Args:
            key: of the item.
            features: of any shapes and dtypes.
        """
        values = sum(tensor.nbytes for tensor in features.values())
        return len(_MAGIC) + _HEAD.size + len(_description(key, features)) + values

    def bytes(self) -> int:
        """That it takes."""
        return sum(file.stat().st_size for file in self.path.glob(f"??/*{_SUFFIX}"))


def make_room(root: Path, keep: Iterable[Path], room: int) -> list[Path]:
    """Remove folders of other encoders, those that were changed last at the end, until all take no
    more than there is room for; returns them.

    Args:
        root: of all folders.
        keep: those that are in use.
        room: bytes for all.
    """
    used = {path.resolve() for path in keep}
    there = [path for path in root.iterdir() if path.is_dir()] if root.is_dir() else []
    sizes = {path: FeatureFolder(path, 0).bytes() for path in there}
    total, removed = sum(sizes.values()), []
    for path in sorted(there, key=lambda path: path.stat().st_mtime_ns):
        if total <= room or path.resolve() in used:
            continue
        shutil.rmtree(path, ignore_errors=True)
        total -= sizes[path]
        removed.append(path)
    return removed


def _checksum(data: bytes | memoryview) -> int:
    import xxhash  # a rank that keeps no features does not need it

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
        own = torch.empty(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        place = own.reshape(-1).view(torch.uint8).numpy()
        place[:] = np.frombuffer(values[: own.nbytes], np.uint8)
        features[tensor["name"]] = own
        values = values[own.nbytes :]
    return features
