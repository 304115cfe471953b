"""Reader for CTranslate2's ``model.bin``: named tensors, little-endian, nothing executable.

Layout of binary version 6, as CTranslate2's ``ModelSpec`` writes it::

    u32 version, string spec name, u32 spec revision,
    u32 n, n x (string name, u8 rank, rank x u32 size, u8 dtype, u32 bytes, data),
    u32 m, m x (string alias, string name)

with ``string`` a u16 length that counts the closing NUL, then that many bytes.
"""

import math
import struct
from pathlib import Path

import torch
from torch import Tensor

_VERSIONS = (5, 6)
_DTYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}
_MAX_RANK = 8
_MAX_COUNT = 1_000_000  # tensors or aliases; a real model has some hundreds


class _Cursor:
    """Bounds-checked reads from a buffer; every error names the file and the offset."""

    def __init__(self, path: Path, data: bytearray):
        self.path, self.data, self.offset = path, memoryview(data), 0

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: byte {self.offset}: {message}")

    def take(self, size: int, what: str) -> memoryview:
        left = len(self.data) - self.offset
        if size > left:
            raise self.error(f"{what} needs {size} bytes, {left} are left (truncated or corrupt)")
        self.offset += size
        return self.data[self.offset - size : self.offset]

    def integer(self, code: str, what: str) -> int:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(code), what))[0]

    def count(self, what: str) -> int:
        value = self.integer("I", what)
        if value > _MAX_COUNT:
            raise self.error(f"{what} is {value}, at most {_MAX_COUNT} is accepted (corrupt)")
        return value

    def string(self, what: str) -> str:
        raw = bytes(self.take(self.integer("H", what), what))
        if not raw.endswith(b"\0"):
            raise self.error(f"{what} {raw[:40]!r} does not end in NUL (corrupt)")
        try:
            return raw[:-1].decode()
        except UnicodeDecodeError as error:
            raise self.error(f"{what} {raw[:40]!r} is not UTF-8 (corrupt)") from error

    def tensor(self, name: str) -> Tensor:
        rank = self.integer("B", f"rank of {name!r}")
        if rank > _MAX_RANK:
            raise self.error(f"{name!r} has rank {rank}, at most {_MAX_RANK} is accepted (corrupt)")
        shape = [self.integer("I", f"shape of {name!r}") for _ in range(rank)]
        code = self.integer("B", f"dtype of {name!r}")
        if code not in _DTYPES:
            raise self.error(f"{name!r} has dtype code {code}, accepted are {sorted(_DTYPES)}")
        dtype = _DTYPES[code]
        size = self.integer("I", f"size of {name!r}")
        if size != math.prod(shape) * dtype.itemsize:
            raise self.error(f"{name!r} of shape {shape} and {dtype} cannot have {size} bytes")
        raw = self.take(size, f"data of {name!r}")
        if not size:
            return torch.empty(shape, dtype=dtype)
        # cloned: offsets in the file are unaligned, and the buffer should not live on
        return torch.frombuffer(raw, dtype=torch.uint8).clone().view(dtype).reshape(shape)


def read_tensors(path: str | Path, spec: str) -> dict[str, Tensor]:
    """Return all tensors of the CTranslate2 model file ``path`` by name, aliases included.

    ``spec`` is the model kind the file must declare, e.g. ``"WhisperSpec"``. Tensors keep the
    file's dtype and shape; an alias is the same tensor object as what it stands for.

    Raises ``ValueError`` naming file, offset and reason if the file is not such a model, is
    truncated or corrupt, and ``OSError`` if it cannot be read.
    """
    path = Path(path)
    cursor = _Cursor(path, bytearray(path.read_bytes()))
    version = cursor.integer("I", "binary version")
    if version not in _VERSIONS:
        raise cursor.error(f"binary version is {version}, accepted are {_VERSIONS}")
    found = cursor.string("spec name")
    if found != spec:
        raise cursor.error(f"spec is {found!r}, expected {spec!r}")
    cursor.integer("I", "spec revision")

    tensors: dict[str, Tensor] = {}
    for _ in range(cursor.count("tensor count")):
        name = cursor.string("tensor name")
        if name in tensors:
            raise cursor.error(f"tensor {name!r} appears twice (corrupt)")
        tensors[name] = cursor.tensor(name)
    for _ in range(cursor.count("alias count")):
        alias, name = cursor.string("alias"), cursor.string("alias target")
        if name not in tensors:
            raise cursor.error(f"alias {alias!r} stands for unknown tensor {name!r} (corrupt)")
        tensors[alias] = tensors[name]
    if cursor.offset != len(cursor.data):
        raise cursor.error(f"{len(cursor.data) - cursor.offset} bytes follow the last alias")
    return tensors
