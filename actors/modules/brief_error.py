"""What an error says, in a line."""

from __future__ import annotations

_MOST_CHARACTERS = 300  # of another library's error that are shown


def brief(error: BaseException) -> str:
    """Another library's error in a line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
