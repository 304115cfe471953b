"""The programs that driver and ranks keep: both forget the least recently used one alike."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

# Programs a rank keeps: one per combination of modalities seen in a step's microbatches.
MAX_PROGRAMS = 256


Key = TypeVar("Key")
Value = TypeVar("Value")


def remember(programs: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Put ``key`` last and drop the least recently used entry beyond :data:`MAX_PROGRAMS`.

    Args:
        programs: from the least to the most recently used; changed in place.
        key: of the program that is used now.
        value: the program, or None where only its place is kept.
    """
    programs[key] = value
    programs.move_to_end(key)
    if len(programs) > MAX_PROGRAMS:
        programs.popitem(last=False)
