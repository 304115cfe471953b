"""What an error says, in a line."""

from __future__ import annotations

from raymm.errors import Error

_MOST_CHARACTERS = 300  # of another library's error that are shown


def brief(error: BaseException) -> str:
    """Return an error in a line: a sentence of raymm, or another library's error with its class."""
    text = " ".join(str(error).split())
    if text and isinstance(error, Error):
        return text
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def because(error: BaseException, why: str = "") -> str:
    """Return the end of a sentence that says why something is refused.

    A sentence of raymm is the reason. The text of another library's error is a detail in
    parentheses, so that the sentence before it must be understood without that text.

    Args:
        error: what was raised.
        why: the reason, if another library raised the error.
    """
    if isinstance(error, Error):
        return f": {brief(error)}"
    return f"{why and ': '}{why} ({brief(error)})"
