"""What transformers asks a mask's values for, answered by what the host knows.

A model's forward looks whether its mask hides anything, and whether position ids jump, which each
waits for the device. :class:`KnownMask` answers the first; :func:`no_packed_rows` the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from transformers import masking_utils

from raymm.kernels.host_copies import on_host, remember, to_device

# Any: to type checkers, attributes of the class are what its instances have.
_T: Any = torch.Tensor
_ANSWERS = {_T.all: torch.Tensor.all, _T.sum: torch.Tensor.sum}
_no_packed_rows: ContextVar[bool] = ContextVar("no_packed_rows", default=False)
_FIND = "find_packed_sequence_indices"


class KnownMask(torch.Tensor):
    """A (B, T) mask on a device that says without waiting whether all of it is seen; what is
    computed with it is an ordinary tensor."""

    @staticmethod
    def of(mask: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A mask of the host's on a device.

        Args:
            mask: (B, T), integers or bools, whose values the host knows.
            device: where it is to be.
        """
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
    """Within, transformers does not look for position ids that jump, by which it tells sequences
    that are packed into one row.

    Args:
        certain: that there are none, or that a mask keeps them apart; if not, it looks.
    """
    _patch()
    token = _no_packed_rows.set(certain)
    try:
        yield
    finally:
        _no_packed_rows.reset(token)


def _patch() -> None:
    find = getattr(masking_utils, _FIND, None)  # of other releases: the model looks, and waits
    if find is None or getattr(find, "_raymm", False):
        return

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        return None if _no_packed_rows.get() else find(position_ids)

    marked: Any = find_packed_sequence_indices
    marked._raymm = True
    setattr(masking_utils, _FIND, marked)
