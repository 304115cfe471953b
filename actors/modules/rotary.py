"""Rotary embeddings whose frequencies depend on the longest text of a forward.

The types ``dynamic`` and ``longrope`` of transformers choose frequencies by the largest position,
and ``dynamic`` remembers the largest so far. Here frequencies depend on one microbatch only, as for
a new model that gets all of its rows, so layouts, recomputation and resuming do not change results.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from raymm.errors import InternalError

_POSITIONS = "position_ids"


class RotaryState:
    """Hooks that make rotary embeddings depend only on one forward's longest text."""

    def __init__(self, module: nn.Module) -> None:
        self._longest: int | None = None
        self._hooks = [
            hook for child in module.modules() if any(_types(child))
            for hook in (
                child.register_forward_pre_hook(self._before, with_kwargs=True),
                child.register_forward_hook(self._after),
            )
        ]

    def __bool__(self) -> bool:
        """Return True if the module has such embeddings."""
        return bool(self._hooks)

    def set_longest(self, longest: int | None) -> None:
        """Set one more than the largest position that counts in the following forwards; None to use
        the positions in a forward's arguments."""
        self._longest = longest

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before(self, rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Reset the state of earlier forwards, and append the longest position."""
        _forget(rotary)
        if self._longest is None:
            return None
        bound = inspect.signature(rotary.forward).bind(*args, **kwargs)
        positions = bound.arguments[_POSITIONS]
        last = positions.new_full((*positions.shape[:-1], 1), self._longest - 1)
        bound.arguments[_POSITIONS] = torch.cat([positions, last], dim=-1)
        return bound.args, bound.kwargs

    def _after(self, rotary: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Remove the output for the appended position."""
        if self._longest is None:
            return None
        if isinstance(output, torch.Tensor):  # complex frequencies
            return output[..., :-1, :]
        if isinstance(output, tuple) and all(isinstance(table, torch.Tensor) for table in output):
            return tuple(table[..., :-1, :] for table in output)
        raise InternalError(f"{type(rotary).__name__} returns {type(output).__name__}")


def _types(module: nn.Module) -> Iterable[tuple[str, str]]:
    """Return (attribute prefix, rope type) of each affected layer type of a module."""
    types = getattr(module, "rope_type", None)
    if not hasattr(type(module).forward, "__wrapped__"):
        return ()  # does not update its frequencies
    types = {"": types} if isinstance(types, str) else types if isinstance(types, dict) else {}
    return [
        (f"{name}_" if name else "", kind) for name, kind in types.items()
        if isinstance(kind, str) and ("dynamic" in kind or kind == "longrope")
    ]


def _forget(rotary: Any) -> None:
    """Reset frequencies and longest text to those of a new module."""
    for prefix, kind in _types(rotary):
        if "dynamic" in kind:
            original = getattr(rotary, f"{prefix}original_inv_freq")
            current = getattr(rotary, f"{prefix}inv_freq")
            rotary.register_buffer(f"{prefix}inv_freq", original.to(current.device), False)
            setattr(rotary, f"{prefix}max_seq_len_cached", rotary.original_max_seq_len)
