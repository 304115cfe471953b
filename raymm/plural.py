"""Numbers of things in texts. This module imports nothing else of raymm."""

from __future__ import annotations


def plural(count: int, noun: str, ending: str = "s") -> str:
    """Return a number and its noun: ``"1 rank"``, ``"2 ranks"``, ``"1,024 ranks"``.

    Args:
        ending: ending of the plural, ``"es"`` for ``"process"``.
    """
    return f"{count:,} {noun}{ending if count != 1 else ''}"
