"""Strict reading of JSON from other tools: every field is checked, and every error names its
field."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raymm.errors import PlanError

# Whole numbers fit into 64 bits, and products of other numbers do not overflow.
MOST_WHOLE = 2**63 - 1
MOST_NUMBER = 1e100
# Largest nesting depth of objects and lists. Accepted formats need at most ten.
MOST_DEPTH = 50
# Tables have one entry per GPU and one per step of a GPU's quota.
MOST_GPUS = 2**16
MOST_STEPS = 10_000


def read_file(path: str | Path) -> str:
    """Return the text of a UTF-8 file without its byte order mark; raise ``PlanError`` naming the
    file if it cannot be read."""
    try:
        return Path(path).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not UTF-8: {error}") from None
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}") from None


def json_value(source: str, what: str) -> Any:
    """Parse JSON; raise ``PlanError`` for duplicate fields in an object and for nesting deeper than
    :data:`MOST_DEPTH`, which parsers treat differently."""
    try:
        data = json.loads(source, object_pairs_hook=lambda pairs: _once(pairs, what))
    except PlanError:
        raise
    except RecursionError:
        raise PlanError(_too_deep(what)) from None
    except ValueError as error:  # also raised for numbers of thousands of digits
        raise PlanError(f"{what} is not JSON: {error}") from None
    level = [data]
    for _ in range(MOST_DEPTH + 1):
        level = [
            inner for container in level if isinstance(container, dict | list)
            for inner in (container.values() if isinstance(container, dict) else container)
        ]
    if level:
        raise PlanError(_too_deep(what))
    return data


def _too_deep(what: str) -> str:
    return f"{what} has lists and objects nested deeper than {MOST_DEPTH}"


def _once(pairs: list[tuple[str, Any]], what: str) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"{what} has the field {twice!r:.80} more than once in an object")
    return table


def parsed(
    source: str, what: str, version: int, fields: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Parse a JSON object that has ``format`` = ``version``, exactly the given fields, and any of
    the optional ones; else raise ``PlanError``. ``what`` names the document in error messages."""
    data = members(json_value(source, what), what, ("format", *fields), optional)
    if type(data["format"]) is not int or data["format"] != version:
        raise PlanError(f"{what}.format is {shown(data['format'])}; accepted: {version}")
    return data


def members(
    data: Any, where: str, fields: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the object; raise ``PlanError`` unless it has exactly the given fields and any of the
    optional ones. ``where`` names the value in error messages."""
    if not isinstance(data, dict):
        raise PlanError(f"{where} is {shown(data)}; it must be an object")
    for name in fields:
        if name not in data:
            raise PlanError(f"{where} has no field {name!r}; needed: {', '.join(fields)}")
    if unknown := sorted(set(data) - {*fields, *optional}):
        accepted = ", ".join((*fields, *optional))
        raise PlanError(f"{where} has unknown fields {unknown}; accepted: {accepted}")
    return data


def shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except ValueError:  # Python refuses to print numbers of thousands of digits
        return "a number of thousands of digits"


def items(value: Any, where: str) -> list[Any]:
    """Return the value as a list; raise ``PlanError`` if it is neither a list nor a tuple."""
    if not isinstance(value, list | tuple):
        raise PlanError(f"{where} is {shown(value)}; it must be a list")
    return list(value)


def text(value: Any, where: str) -> str:
    """Return the value; raise ``PlanError`` if it is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise PlanError(f"{where} is {shown(value)}; it must be a non-empty string")
    return value


def whole(value: Any, where: str, least: int = 0, most: int | None = None) -> int:
    """Return the value if it is a whole number from ``least`` to ``most`` (default
    :data:`MOST_WHOLE`); else raise ``PlanError``. ``where`` names the value in error messages."""
    if type(value) is not int or not least <= value <= (MOST_WHOLE if most is None else most):
        above = type(value) is int and value > MOST_WHOLE
        accepted = f"from {least} to {most}"
        if most is None:
            accepted = f"from {least} to {MOST_WHOLE}" if above else f"at least {least}"
        raise PlanError(f"{where} is {shown(value)}; it must be a whole number {accepted}")
    return value


def number(
    value: Any, where: str, least: float = -math.inf, most: float = math.inf, above: bool = False
) -> float:
    """Return the number as a float. Raise ``PlanError`` if it is not finite, is outside the range
    (``above`` excludes ``least``), or its absolute value is above :data:`MOST_NUMBER`. ``where``
    names the value in error messages."""
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    # This comparison also works for whole numbers that are too large for a float.
    finite = plain and -MOST_NUMBER <= value <= MOST_NUMBER
    if finite and least <= value <= most and not (above and value == least):
        return float(value)
    accepted = "finite"
    if least > -math.inf:
        accepted += f", {'above' if above else 'at least'} {least:g}"
    if most < math.inf or (plain and not finite and value == value and abs(value) != math.inf):
        accepted += f", at most {min(most, MOST_NUMBER):g}"
    raise PlanError(f"{where} is {shown(value)}; it must be a number, {accepted}")
