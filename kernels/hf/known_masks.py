"""Mask queries of transformers answered from host copies, without a device sync.

A model's forward checks whether its mask hides any token, and whether position ids jump; each check
waits for the device. :class:`KnownMask` answers the first, :func:`no_packed_rows` the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import masking_utils

from raymm.kernels.host_copies import on_host, remember, to_device

# Any, because type checkers take class attributes for those of instances.
_T: Any = torch.Tensor
_ANSWERS = {_T.all: torch.Tensor.all, _T.sum: torch.Tensor.sum}
_no_packed_rows: ContextVar[bool] = ContextVar("no_packed_rows", default=False)
_FIND = "find_packed_sequence_indices"


class KnownMask(torch.Tensor):
    """A (B, T) mask on a device that answers ``all`` and ``sum`` from its host copy. Other
    operations return ordinary tensors."""

    @staticmethod
    def of(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Move a (B, T) mask of integers or bools, whose values the host knows, to a device."""
        host = on_host(mask)
        if device.type == "cpu":
            return host
        moved = to_device(host, device).as_subclass(KnownMask)
        remember(moved, host)
        return moved

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _ANSWERS and len(args) == 1 and not kwargs:
                return _ANSWERS[func](on_host(args[0]))
            result = func(*args, **kwargs)
            if func is not _T.to:
                return result
            cast = result.as_subclass(KnownMask)
            remember(cast, on_host(args[0]).to(result.dtype))
            return cast


@contextmanager
def no_packed_rows(certain: bool) -> Iterator[None]:
    """Context in which transformers does not search position ids for jumps, its sign of sequences
    packed into one row. ``certain`` is True if there are none, or a mask separates them; if it is
    False, transformers searches."""
    _patch()
    token = _no_packed_rows.set(certain)
    try:
        yield
    finally:
        _no_packed_rows.reset(token)


def _patch() -> None:
    find = getattr(masking_utils, _FIND, None)  # absent in some releases
    if find is None or getattr(find, "_raymm", False):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if _no_packed_rows.get() else find(position_ids)

    marked: Any = find_packed_sequence_indices
    marked._raymm = True
    setattr(masking_utils, _FIND, marked)
