"""Layout of a message: the shapes and dtypes that both ends need to transfer it."""

from __future__ import annotations

import json
from math import prod
from typing import NamedTuple

import torch

from raymm.actors.modules.message import Message
from raymm.actors.modules.message_samples import USED
from raymm.errors import ChannelError
from raymm.kernels.host_copies import on_host


class Layout(NamedTuple):
    """Shapes and dtypes of a message: ``tensors``, optionally with ``names``, and named ``side``
    entries."""

    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    side: tuple[tuple[str, tuple[int, ...], torch.dtype], ...] = ()
    names: tuple[str, ...] = ()

    @classmethod
    def of(cls, message: Message) -> Layout:
        tensors = tuple([(t.shape, t.dtype) for t in message.tensors])
        if not message.side:
            return cls(tensors, (), message.names)
        side = tuple([(n, t.shape, t.dtype) for n, t in message.side.items()])
        return cls(tensors, side, message.names)

    def is_of(self, message: Message) -> bool:
        """Return True if a message has this layout. Faster than creating the message's own
        layout."""
        if len(message.tensors) != len(self.tensors) or message.names != self.names:
            return False
        for tensor, (shape, dtype) in zip(message.tensors, self.tensors, strict=True):
            if tensor.shape != shape or tensor.dtype is not dtype:
                return False
        return not (message.side or self.side) or self == Layout.of(message)

    def of_gradients(self) -> Layout:
        """Return the layout of the tensors' gradients. Named tensors have an additional byte each
        (:func:`raymm.actors.modules.message_samples.used_tensors`)."""
        count = len(self.names)
        return Layout(self.tensors, ((USED, (count,), torch.uint8),) if count else ())

    @property
    def side_bytes(self) -> int:
        return sum(_nbytes(shape, dtype) for _, shape, dtype in self.side)

    def encode(self) -> bytes:
        tensors = [(shape, str(dtype)) for shape, dtype in self.tensors]
        side = [(name, shape, str(dtype)) for name, shape, dtype in self.side]
        return json.dumps([tensors, side, self.names]).encode()

    @classmethod
    def decode(cls, data: bytes) -> Layout:
        """Invert :meth:`encode`. Raise a ``ChannelError`` if the data name an unknown dtype."""
        tensors, side, names = json.loads(data)
        return cls(
            tuple((tuple(shape), _dtype(dtype)) for shape, dtype in tensors),
            tuple((name, tuple(shape), _dtype(dtype)) for name, shape, dtype in side),
            tuple(names),
        )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ChannelError(f"a message has the unknown dtype {name!r}")
    return dtype


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return dtype.itemsize * prod(shape)


def pack(side: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return all side entries as one byte tensor in host memory."""
    entries = (on_host(entry.detach()) for entry in side.values())
    return torch.cat([entry.contiguous().view(-1).view(torch.uint8) for entry in entries])


def unpack(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Invert :func:`pack`."""
    side, offset = {}, 0
    for name, shape, dtype in layout.side:
        size = _nbytes(shape, dtype)
        # clone: a view at an odd byte offset is not aligned for its dtype.
        side[name] = buffer[offset : offset + size].clone().view(dtype).view(shape)
        offset += size
    return side
