"""Reading JSON that others wrote: every field is checked, every error names it."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any


class MultiplexError(ValueError):
    """Something that cannot be planned: names the field, its value and what is accepted."""


def parsed(text: str, what: str, version: int, fields: Sequence[str]) -> dict[str, Any]:
    """The object in a text that has ``format`` = ``version`` and exactly the given fields.

    Raises:
        MultiplexError: no JSON, another format, a field too few or too many.
    """
    try:
        data = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise MultiplexError(f"{what} is not JSON: {error}") from error
    members(data, what, ("format", *fields))
    if type(data["format"]) is not int or data["format"] != version:
        raise MultiplexError(f"{what}.format is {data['format']!r}; accepted: {version}")
    return data


def members(data: Any, where: str, fields: Sequence[str]) -> dict[str, Any]:
    """The object itself, if it has exactly the given fields.

    Raises:
        MultiplexError: it is no object, or has a field too few or too many.
    """
    if not isinstance(data, dict):
        raise MultiplexError(f"{where} is {data!r:.80}; it must be an object")
    for name in fields:
        if name not in data:
            raise MultiplexError(f"{where} has no field {name!r}; needed: {', '.join(fields)}")
    if unknown := sorted(set(data) - set(fields)):
        raise MultiplexError(f"{where} has unknown fields {unknown}; accepted: {', '.join(fields)}")
    return data


def items(value: Any, where: str) -> list[Any]:
    """The list itself.

    Raises:
        MultiplexError: it is none.
    """
    if not isinstance(value, list | tuple):
        raise MultiplexError(f"{where} is {value!r:.80}; it must be a list")
    return list(value)


def text(value: Any, where: str) -> str:
    """The text itself.

    Raises:
        MultiplexError: it is none, or empty.
    """
    if not isinstance(value, str) or not value:
        raise MultiplexError(f"{where} is {value!r:.80}; it must be a text that is not empty")
    return value


def whole(value: Any, where: str, least: int = 0, most: int | None = None) -> int:
    """The whole number itself.

    Raises:
        MultiplexError: it is none, or outside ``least`` to ``most``.
    """
    if type(value) is not int or value < least or (most is not None and value > most):
        accepted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise MultiplexError(f"{where} is {value!r:.80}; it must be a whole number {accepted}")
    return value


def number(
    value: Any, where: str, least: float = -math.inf, most: float = math.inf, above: bool = False
) -> float:
    """The number as a float.

    Raises:
        MultiplexError: it is none, not finite, or outside ``least`` (exclusive if ``above``) to
            ``most``.
    """
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if plain and math.isfinite(value) and least <= value <= most and not (above and value == least):
        return float(value)
    accepted = "finite"
    if least > -math.inf:
        accepted += f", {'above' if above else 'at least'} {least:g}"
    if most < math.inf:
        accepted += f", at most {most:g}"
    raise MultiplexError(f"{where} is {value!r:.80}; it must be a number, {accepted}")
