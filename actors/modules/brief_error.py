"""One-line descriptions of errors."""

from __future__ import annotations

from raymm.errors import Error

_MOST_CHARACTERS = 300  # limit for errors of other libraries


def brief(error: BaseException) -> str:
    """Return an error in one line, with the class name unless raymm raised the error."""
    text = " ".join(str(error).split())
    if text and isinstance(error, Error):
        return text
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def because(error: BaseException, why: str = "") -> str:
    """Return the end of a sentence that explains a rejection.

    A raymm error is the reason itself. The text of another library's error is only a detail in
    parentheses, so the sentence must be clear without it.

    Args:
        why: the reason, if another library raised the error.
    """
    if isinstance(error, Error):
        return f": {brief(error)}"
    return f"{why and ': '}{why} ({brief(error)})"
