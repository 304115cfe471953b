"""Messages about wrong fields of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

# Maximum number of characters of a value in an error.
_SHOWN = 200


def explain(
    error: ValidationError, section: type[BaseModel],
    is_shown: Callable[[ErrorDetails], bool] = lambda item: True,
) -> str:
    """Return a line per wrong field: its path, what is accepted, and its value.

    Args:
        is_shown: returns False for errors to leave out.
    """
    branches = _model_names(section)
    lines: list[tuple[str, str | None, str]] = []  # where, text, value
    accepted: dict[str, list[str]] = {}  # alternatives of a field without a text
    for item in filter(is_shown, error.errors()):
        path = [key for key in item["loc"] if not _is_branch(key, branches)]
        where = ".".join(map(str, path)) or "config"
        if item["type"] == "extra_forbidden":
            names = _fields_at(section, path[:-1])
            text = f"unknown key; {_meant(path, names, section)}accepted: {', '.join(names)}"
        elif item["type"] == "missing":
            text = "required, but not given"
        elif item["type"] == "invalid_key" or path[-1:] == ["[key]"]:
            text = "keys must be strings; put this one in quotes"
        elif (kind := _kind(item)) is not None:
            if where not in accepted:
                lines.append((where, None, f" (got {shown(item['input'])})"))
            accepted.setdefault(where, []).append(kind)
            continue
        else:
            text = item["msg"].removeprefix("Value error, ")
            if not isinstance(item["input"], dict):
                text += f" (got {shown(item['input'])})"
        lines.append((where, text, ""))
    return "\n".join(
        f"{where}: {text or 'accepted: ' + ' or '.join(dict.fromkeys(accepted[where]))}{value}"
        for where, text, value in lines
    )


def _kind(item: ErrorDetails) -> str | None:
    """Return the accepted values of a field, e.g. ``"a whole number"``; None for other errors."""
    limits = {
        "greater_than": "a number greater than {gt}", "greater_than_equal": "a number from {ge}",
        "less_than": "a number less than {lt}", "less_than_equal": "a number up to {le}",
        "literal_error": "{expected}",
    }
    if item["type"] in limits:
        values = item.get("ctx", {}).items()
        return limits[item["type"]].format(**{
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in values
        })
    return {
        "int_type": "a whole number", "int_from_float": "a whole number",
        "float_type": "a number", "finite_number": "a finite number", "string_type": "a text",
        "bool_type": "true or false", "list_type": "a list", "tuple_type": "a list",
        "dict_type": "a section of keys", "model_type": "a section of keys",
    }.get(item["type"])


def _is_branch(key: int | str, models: Collection[str]) -> bool:
    """Return True if pydantic added a key for the alternative of a union."""
    return isinstance(key, str) and (
        "[" in key and key != "[key]" or key.startswith("constrained-")
        or key in ("str", "int", "float", "bool") or key in models
    )


def _model_names(section: type[BaseModel]) -> set[str]:
    inner = [m for field in section.model_fields.values() for m in _models_in(field.annotation)]
    return {section.__name__}.union(*map(_model_names, inner))


def shown(value: Any) -> str:
    """Format a value for an error message."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python does not print numbers of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def closest(name: str, accepted: Iterable[str]) -> str | None:
    """Return the accepted name that is most similar to a misspelt one, or None."""
    return next(iter(difflib.get_close_matches(name, list(accepted), 1)), None)


def _meant(path: Sequence[Any], accepted: Sequence[str], section: type[BaseModel]) -> str:
    """Return "did you mean ...?" for a misspelt key or a key of another section."""
    *parents, name = map(str, path)
    if suggestion := closest(name, accepted):
        return f"did you mean {'.'.join([*parents, suggestion])}? "
    elsewhere = [".".join(field_path) for field_path in _paths(section) if field_path[-1] == name]
    return f"did you mean {' or '.join(elsewhere)}? " if elsewhere else ""


def _paths(section: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every field, except those of sections in lists and mappings."""
    for name, field in section.model_fields.items():
        yield (name,)
        arguments = (field.annotation, *getattr(field.annotation, "__args__", ()))
        for inner in arguments:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from ((name, *path) for path in _paths(inner))


def _fields_at(section: type[BaseModel], path: Sequence[Any]) -> list[str]:
    """Return the field names of the section at a location."""
    is_name = False  # a key of a mapping, such as an encoder's name, does not change the section
    for key in path:
        field = None if is_name else section.model_fields.get(key)
        models = _models_in(field.annotation) if field is not None else []
        is_name = bool(models) and field is not None and _is_mapping(field.annotation)
        if models:
            section = models[0]
    return sorted(section.model_fields)


def _is_mapping(annotation: Any) -> bool:
    inner = getattr(annotation, "__args__", ())
    return get_origin(annotation) is dict or any(map(_is_mapping, inner))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [m for argument in getattr(annotation, "__args__", ()) for m in _models_in(argument)]
